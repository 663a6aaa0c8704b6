"""A matrix product whose rows do not depend on the number of rows.

One program computes each output as one sum over K in steps of 16, the K of one wgmma, without splits. The weight is the
first operand of the tensor cores ("swap AB"), so tokens are the narrow side of m64nNk16, and on Hopper that instruction
sums K in the same way for every N. The tile may therefore depend on the number of tokens: it determines which program
computes an output, not how. A tile has at least 64 rows and 4 warps, since Triton would use mma.sync otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import PDL, dot, release_consumers, round_to, wait_for_producers

__all__ = ["FLOAT32_TILE", "TILES", "Tile", "choose_tile", "matmul_invariant"]


@dataclass(frozen=True)
class Tile:
    """`rows` of the weight by `tokens` by `columns` of K."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int


TILES = {
    16: Tile(64, 16, 256, 4, 5),
    32: Tile(64, 32, 128, 4, 6),
    64: Tile(64, 64, 128, 4, 5),
    128: Tile(64, 128, 64, 4, 6),
    256: Tile(128, 256, 64, 8, 3),
}
"""By tokens. On an H200 in bf16, for weights [28672, 4096] and [4096, 4096], with cuBLAS in parentheses: 1 token 61.7
us (55.8) and 12.4 us (12.5); 64 tokens 65.8 us (61.1) and 13.7 us (12.0); 256 tokens 106 us (88) and 18.6 us (18.0);
8,192 tokens 637 TFLOP/s (815) and 654 TFLOP/s (806). All five give the same bits for 1 to 300 and 8,192 tokens."""

FLOAT32_TILE = Tile(64, 32, 32, 4, 3)
"""For float32, at any number of tokens. Tensor cores do not support float32, and the tiles of `TILES` would need up to
328 KB of shared memory, of which there are 227. Not timed."""

_GROUP = 8
"""Number of tiles of tokens that share one tile of the weight while it is in L2."""


def choose_tile(tokens: int, n: int, dtype: torch.dtype, processors: int) -> Tile:
    """Return the smallest tile that holds all tokens, or for many tokens the widest one that still fills the device."""
    if dtype.itemsize > 2:
        return FLOAT32_TILE
    for size in (16, 32, 64):
        if tokens <= size:
            return TILES[size]
    wide = TILES[256]
    full = triton.cdiv(tokens, wide.tokens) * triton.cdiv(n, wide.rows) >= processors
    return wide if full else TILES[128]


@triton.jit(do_not_specialize=["tokens"])
def invariant_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K], weight [N, K] -> out [tokens, N]. One program per tile, in groups of GROUP tiles of tokens."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    group = pid // (GROUP * N_TILES)
    height = min(token_tiles - group * GROUP, GROUP)
    inside = pid % (GROUP * N_TILES)
    token_ids = (group * GROUP + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    release_consumers(USE_PDL)
    wait_for_producers(USE_PDL)

    # Rows beyond the end repeat the last one, which costs no mask; their products are not stored.
    w_rows = weight_ptr + (rows if EVEN_N else tl.minimum(rows, N - 1))[:, None].to(tl.int64) * K
    x_rows = x_ptr + tl.minimum(token_ids, tokens - 1)[:, None].to(tl.int64) * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns[None, :]
        if EVEN_K:
            w = tl.load(w_rows + k)
            x = tl.load(x_rows + k)
        else:
            w = tl.load(w_rows + k, mask=k < K, other=0.0)
            x = tl.load(x_rows + k, mask=k < K, other=0.0)
        acc = dot(w, tl.trans(x), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + token_ids[:, None].to(tl.int64) * N + rows[None, :]
    tl.store(out_ptrs, tl.trans(round_to(acc, dtype)), mask=(token_ids < tokens)[:, None] & (rows < N)[None, :])


def matmul_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, out: Tensor | None = None) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N], in `out` [T, N] if given, with the same bits for
    every tile. All tensors are contiguous, and T is not 0."""
    tokens, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    invariant_kernel[(triton.cdiv(tokens, tile.tokens) * triton.cdiv(n, tile.rows),)](
        x, weight, weight if bias is None else bias, out, tokens, n, k, tile.tokens, tile.rows, tile.columns,
        _GROUP, bias is not None, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip
    return out
