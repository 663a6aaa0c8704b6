"""The table of bench/kernels.py: each op at the shapes of a model, what it must move and compute, and torch's own way.

Adding an entry is adding an `Entry` to one of the functions below. `build` makes fresh inputs and returns the call to
time; it runs several times, so that a cold entry finds none of its inputs in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import KVCache, LatentKV, PackedWeight, PagedKV, QuantizedKV, sampling
from asyncllm.kernels.packed import PLANE, chunk_of
from asyncllm.kernels.quantized_kv import FORMATS

__all__ = ["LLAMA_3_8B", "Entry", "Shapes", "entries"]

Call = Callable[[], object]

EPSILON = 1e-5
LOGIT_SPREAD = 3.0
"""Standard deviation of the logits to sample from, so that top-p leaves some of the top-k tokens out."""


@dataclass(frozen=True)
class Shapes:
    """The model and the batches. Prompts of `prefill` are (requests, tokens each)."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    rows: tuple[int, ...] = (1, 16, 64, 256)
    gated: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    """More numbers of rows for products with a gate, whose kernel depends on them."""
    chunk: int = 8192
    """Tokens of a prefill step."""
    decode: tuple[tuple[int, int], ...] = ((1, 256), (16, 640), (64, 640), (256, 1024))
    """(requests, tokens of context each)."""
    prefill: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048), (16, 512))
    latent: tuple[int, int, int] = (16, 512, 64)
    """Latent attention, of DeepSeek-V2-Lite: heads, numbers of a latent, and of a rotated key."""
    segments: tuple[tuple[int, int, tuple[int, ...]], ...] = (
        (16, 64, (1025,)),
        (16, 64, (1025,) * 13),
        (16, 80, (1024,)),
        (16, 80, (6912,)),
        (16, 80, (64,) * 108),
        (16, 80, (1024, 6912, 256, 2300)),
    )
    """Vision towers of InternVL2 and Qwen2.5-VL: heads, numbers of a head, and patches of tiles, images or windows."""
    memory: tuple[int, int, int] = (32, 16, 128)
    """Delta nets of Qwen3-Next: heads, those of queries and keys, and features of a head."""
    latent_decode: tuple[tuple[int, int], ...] = ((1, 4096), (16, 16384), (64, 4096), (256, 1024))


LLAMA_3_8B = Shapes()


@dataclass(frozen=True)
class Entry:
    """One op at one shape."""

    name: str
    build: Callable[[], Call]
    size: float
    """Bytes that have to be read and written."""
    flops: float = 0.0
    """Multiplications and additions that have to be done by matrix units."""
    peer: Callable[[], Call] | None = None
    """The same in torch: cuBLAS, scaled_dot_product_attention, F.rms_norm, ..."""
    cold: bool = True
    """Inputs come from memory; else they are what the kernel before has just written, and may lie in the L2 cache."""


def entries(shapes: Shapes) -> list[Entry]:
    """All of them, in the order in which a step runs them."""
    groups = (
        _norms,
        _linears,
        _packed,
        _rotary,
        _decode_attention,
        _prefill_attention,
        _segments,
        _latent,
        _activation,
        _sampling,
    )
    return [entry for group in groups for entry in group(shapes)]


def _random(shapes: Shapes, *size: int) -> Tensor:
    return torch.randn(size, device=shapes.device, dtype=shapes.dtype)


def _on(shapes: Shapes, apply: Callable[..., object], *sizes: tuple[int, ...]) -> Callable[[], Call]:
    """How to build a call of `apply` on fresh random tensors of these sizes."""

    def build() -> Call:
        return partial(apply, *(_random(shapes, *size) for size in sizes))

    return build


def _norms(shapes: Shapes) -> Iterator[Entry]:
    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.rms_norm(x, weight, EPSILON)

    def rms_torch(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, EPSILON)

    def add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, residual, weight, EPSILON)

    def add_rms_torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_torch(total, weight), total

    weight = (shapes.hidden,)
    for rows in (*shapes.rows, shapes.chunk):
        plane, size = (rows, shapes.hidden), rows * shapes.hidden * shapes.dtype.itemsize
        yield Entry(
            f"rms_norm {rows}",
            _on(shapes, rms, plane, weight),
            2 * size,
            peer=_on(shapes, rms_torch, plane, weight),
            cold=False,
        )
        yield Entry(
            f"add_rms_norm {rows}",
            _on(shapes, add_rms, plane, plane, weight),
            4 * size,
            peer=_on(shapes, add_rms_torch, plane, plane, weight),
            cold=False,
        )


def _linears(shapes: Shapes) -> Iterator[Entry]:
    heads = shapes.heads * shapes.head_dim
    weights = {
        "qkv": (heads + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden),
        "out": (shapes.hidden, heads),
        "gate_up": (2 * shapes.intermediate, shapes.hidden),
        "down": (shapes.hidden, shapes.intermediate),
        "head": (shapes.vocab, shapes.hidden),
    }

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear(x, weight)

    for name, (out_size, in_size) in weights.items():
        for rows in shapes.rows:
            sizes = (rows, in_size), (out_size, in_size)
            yield Entry(
                f"linear {name} {rows}",
                _on(shapes, linear, *sizes),
                (out_size * in_size + rows * (in_size + out_size)) * shapes.dtype.itemsize,
                flops=2.0 * rows * out_size * in_size,
                peer=_on(shapes, F.linear, *sizes),
            )


def _packed(shapes: Shapes) -> Iterator[Entry]:
    """The same weights in 4 bits, in groups of 128 input features, that of gate and up with its gate."""
    heads = shapes.heads * shapes.head_dim
    weights = {
        "qkv": (heads + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden),
        "out": (shapes.hidden, heads),
        "gate_up": (2 * shapes.intermediate, shapes.hidden),
        "down": (shapes.hidden, shapes.intermediate),
    }

    def build(rows: int, out_size: int, in_size: int, gated: bool) -> Call:
        size = math.gcd(128, in_size)
        words = (-(-in_size // chunk_of(4)), out_size, PLANE)
        groups = (in_size // size, out_size)
        weight = PackedWeight(
            torch.randint(-(2**15), 2**15, words, dtype=torch.int16, device=shapes.device),
            torch.full(groups, 0.004, dtype=torch.float16, device=shapes.device),
            torch.full(groups, 8, dtype=torch.uint8, device=shapes.device),
            None,
            4,
            size,
            in_size,
        )
        product = kernels.linear_packed_silu_mul if gated else kernels.linear_packed
        return partial(product, _random(shapes, rows, in_size), weight)

    for name, (out_size, in_size) in weights.items():
        for rows in shapes.rows:
            # Half a byte for each code, and three for the scale and the zero point of 128.
            stored = out_size * in_size * (0.5 + 3 / 128)
            gated = name == "gate_up"
            moved = rows * (in_size + (out_size // 2 if gated else out_size)) * shapes.dtype.itemsize
            yield Entry(
                f"linear_packed {name} {rows}",
                partial(build, rows, out_size, in_size, gated),
                stored + moved,
                flops=2.0 * rows * out_size * in_size,
            )


CACHES = ("", *FORMATS)
"""A plain cache, and the quantized ones."""


def _paged(shapes: Shapes, lengths: Sequence[int], form: str = "") -> tuple[KVCache, Tensor, Tensor]:
    """A cache with a context of each length in blocks of random order; block tables [B, N], lengths [B], both int32."""
    width = -(-max(lengths) // shapes.block_size) + 1
    count = len(lengths) * width
    pages = _random(shapes, 2, count, shapes.kv_heads, shapes.block_size, shapes.head_dim)
    tables = torch.randperm(count, device=shapes.device).to(torch.int32).view(len(lengths), width)
    cache = QuantizedKV.of(*pages, FORMATS[form]) if form else PagedKV.over(pages)
    return cache, tables, torch.tensor(lengths, dtype=torch.int32, device=shapes.device)


def _kv_bytes(shapes: Shapes, tokens: int, form: str = "") -> int:
    both = 2 * shapes.head_dim * shapes.dtype.itemsize
    if form:
        both = FORMATS[form].planes * shapes.head_dim + 2 * 4
    return tokens * shapes.kv_heads * both


def _label(name: str, form: str) -> str:
    return f"{name} {form}" if form else name


def _rotary(shapes: Shapes) -> Iterator[Entry]:
    features = (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim

    def build(rows: int, form: str) -> Call:
        cache, _, _ = _paged(shapes, [rows], form)
        angles = torch.rand(rows, 1, shapes.head_dim, device=shapes.device)
        return partial(
            kernels.rope_fill_kv,
            _random(shapes, rows, features),
            kernels.Rotation(angles.cos(), angles.sin()),
            cache,
            kernels.plan_cache_write(torch.arange(rows, device=shapes.device), cache),
            num_heads=shapes.heads,
            num_kv_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
        )

    for rows in (*shapes.rows, shapes.chunk):
        # Heads of q, k and v are read and written; cosines and sines, float32, are read.
        size = rows * 2 * (features * shapes.dtype.itemsize + shapes.head_dim * 4)
        for form in CACHES:
            saved = _kv_bytes(shapes, rows) - _kv_bytes(shapes, rows, form)
            yield Entry(_label(f"rope_fill_kv {rows}", form), partial(build, rows, form), size - saved, cold=False)


def _decode_attention(shapes: Shapes) -> Iterator[Entry]:
    def plan(requests: int, context: int) -> Call:
        cache, tables, lengths = _paged(shapes, [context] * requests)
        return partial(kernels.plan_decode_attention, tables, lengths, cache, num_heads=shapes.heads)

    def attend(requests: int, context: int, form: str) -> Call:
        cache, tables, lengths = _paged(shapes, [context] * requests, form)
        planned = kernels.plan_decode_attention(tables, lengths, cache, num_heads=shapes.heads)
        q = _random(shapes, requests, shapes.heads, shapes.head_dim)
        return partial(kernels.paged_decode_attention, q, cache, planned, scale=shapes.head_dim**-0.5)

    for requests, context in shapes.decode:
        label, tokens = f"{requests}x{context}", requests * context
        queries = requests * shapes.heads * shapes.head_dim
        keys = (requests, shapes.kv_heads, context, shapes.head_dim)
        yield Entry(
            f"plan_decode_attention {label}",
            partial(plan, requests, context),
            4.0 * tokens / shapes.block_size,
            cold=False,
        )
        peer = _on(
            shapes,
            partial(F.scaled_dot_product_attention, enable_gqa=True),
            (requests, shapes.heads, 1, shapes.head_dim),
            keys,
            keys,
        )
        for form in CACHES:
            yield Entry(
                _label(f"decode_attention {label}", form),
                partial(attend, requests, context, form),
                _kv_bytes(shapes, tokens, form) + 2 * queries * shapes.dtype.itemsize,
                4.0 * queries * context,
                None if form else peer,
            )


def _prefill_attention(shapes: Shapes) -> Iterator[Entry]:
    def attend(requests: int, length: int, form: str) -> Call:
        cache, tables, lengths = _paged(shapes, [length] * requests, form)
        offsets = torch.arange(0, requests * length + 1, length, dtype=torch.int32, device=shapes.device)
        planned = kernels.plan_prefill_attention(
            tables, offsets, lengths, cache, num_heads=shapes.heads, max_q_len=length
        )
        q = _random(shapes, requests * length, shapes.heads, shapes.head_dim)
        return partial(kernels.paged_prefill_attention, q, cache, planned, scale=shapes.head_dim**-0.5)

    for requests, length in shapes.prefill:
        tokens, features = requests * length, shapes.heads * shapes.head_dim
        keys = (requests, shapes.kv_heads, length, shapes.head_dim)
        peer = _on(
            shapes,
            partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
            (requests, shapes.heads, length, shapes.head_dim),
            keys,
            keys,
        )
        for form in CACHES:
            yield Entry(
                _label(f"prefill_attention {requests}x{length}", form),
                partial(attend, requests, length, form),
                _kv_bytes(shapes, tokens, form) + 2 * tokens * features * shapes.dtype.itemsize,
                # A query sees the tokens before it and itself: half of all pairs.
                4.0 * features * requests * length * (length + 1) / 2,
                None if form else peer,
            )


def _segments(shapes: Shapes) -> Iterator[Entry]:
    def attend(heads: int, size: int, lengths: Sequence[int]) -> Call:
        q, k, v = _random(shapes, sum(lengths), 3, heads, size).unbind(1)
        return partial(kernels.segment_attention, q, k, v, kernels.split_segments(lengths, q.device))

    def one_by_one(heads: int, size: int, lengths: Sequence[int]) -> Call:
        q, k, v = (_random(shapes, 1, heads, sum(lengths), size) for _ in "qkv")

        def attend() -> Tensor:
            pieces = zip(*(each.split(list(lengths), 2) for each in (q, k, v)), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces], 2)

        return attend

    for heads, size, lengths in shapes.segments:
        even = len(set(lengths)) == 1
        batch = (len(lengths), heads, lengths[0], size)
        name = f"{len(lengths)}x{lengths[0]}" if even else "+".join(map(str, lengths))
        yield Entry(
            f"segment_attention {name} of {size}",
            partial(attend, heads, size, lengths),
            4 * sum(lengths) * heads * size * shapes.dtype.itemsize,
            4.0 * heads * size * sum(length * length for length in lengths),
            _on(shapes, F.scaled_dot_product_attention, batch, batch, batch)
            if even
            else partial(one_by_one, heads, size, lengths),
            cold=False,
        )


def _latent(shapes: Shapes) -> Iterator[Entry]:
    heads, rank, rope = shapes.latent
    width = rank + rope

    def lines(requests: int, context: int) -> tuple[LatentKV, Tensor, Tensor]:
        blocks = -(-context // shapes.block_size) + 1
        pages = _random(shapes, requests * blocks, shapes.block_size, width)
        tables = torch.randperm(requests * blocks, device=shapes.device).to(torch.int32).view(requests, blocks)
        kv_lens = torch.full((requests,), context, dtype=torch.int32, device=shapes.device)
        return LatentKV(pages, rank), tables, kv_lens

    def decode(requests: int, context: int) -> Call:
        cache, tables, kv_lens = lines(requests, context)
        plan = kernels.plan_latent_decode(tables, kv_lens, cache, num_heads=heads)
        queries = (_random(shapes, requests, heads, rank), _random(shapes, requests, heads, rope))
        return partial(kernels.latent_decode_attention, *queries, cache, plan, scale=width**-0.5)

    def prefill(requests: int, length: int) -> Call:
        cache, tables, kv_lens = lines(requests, length)
        offsets = torch.arange(0, requests * length + 1, length, dtype=torch.int32, device=shapes.device)
        plan = kernels.plan_latent_prefill(tables, offsets, kv_lens, cache, num_heads=heads, max_q_len=length)
        queries = (_random(shapes, requests * length, heads, rank), _random(shapes, requests * length, heads, rope))
        return partial(kernels.latent_prefill_attention, *queries, cache, plan, scale=width**-0.5)

    def expanded(requests: int, length: int) -> Call:
        cache, tables, kv_lens = lines(requests, length)
        offsets = torch.arange(0, requests * length + 1, length, dtype=torch.int32, device=shapes.device)
        rows = [(length, length)] * requests
        plan = kernels.plan_expanded_prefill(tables, offsets, kv_lens, cache, rows, num_heads=heads)
        value, tokens = rank // 4, requests * length
        q, kv = _random(shapes, tokens, heads, value + rope), _random(shapes, tokens, heads, 2 * value)
        keys = _random(shapes, tokens, rope)
        out = torch.empty(tokens, heads, value, dtype=shapes.dtype, device=shapes.device)

        def attend() -> Tensor:
            kernels.expanded_prefill_attention(q, kv, keys, plan, scale=width**-0.5, out=out)
            return out

        return attend

    itemsize = shapes.dtype.itemsize
    for requests, context in shapes.latent_decode:
        queries = requests * heads
        yield Entry(
            f"latent_decode {requests}x{context}",
            partial(decode, requests, context),
            (requests * context * width + queries * (2 * rank + rope)) * itemsize,
            2.0 * queries * context * (width + rank),
        )
    for requests, length in shapes.prefill:
        tokens, pairs, value = requests * length, requests * length * (length + 1) / 2, rank // 4
        yield Entry(
            f"latent_prefill {requests}x{length}",
            partial(prefill, requests, length),
            (tokens * width + tokens * heads * (2 * rank + rope)) * itemsize,
            2.0 * heads * pairs * (width + rank),
        )
        yield Entry(
            f"expanded_prefill {requests}x{length}",
            partial(expanded, requests, length),
            (tokens * heads * (4 * value + rope) + tokens * rope) * itemsize,
            2.0 * heads * pairs * (2 * value + rope),
        )


def _memory(shapes: Shapes) -> Iterator[Entry]:
    heads, key_heads, size = shapes.memory
    block = 1024

    def build(requests: int, length: int) -> Call:
        device, tokens, blocks = shapes.device, requests * length, -(-length // block)
        tables = torch.arange(requests * blocks, dtype=torch.int32, device=device).view(requests, blocks)
        positions = torch.arange(length, device=device)
        places = (tables[:, positions // block] * block + positions % block).long().flatten()
        offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        lens = torch.full((requests,), length, dtype=torch.int32, device=device)
        plan = kernels.plan_states(places, offsets, lens, tables, block, num_serial=requests if length == 1 else 0)
        q, k = (_random(shapes, tokens, key_heads, size) for _ in range(2))
        decay, beta = (torch.rand(tokens, heads, device=device) for _ in range(2))
        state = torch.zeros(requests * blocks, heads, size, size, device=device)
        v = _random(shapes, tokens, heads, size)
        return partial(kernels.gated_delta_rule, q, k, v, decay.log(), beta, state, plan)

    for requests, length in (*((rows, 1) for rows in shapes.rows), *shapes.prefill):
        tokens, states = requests * length, requests * (1 + -(-length // block))
        vectors = tokens * (2 * key_heads + 2 * heads) * size * shapes.dtype.itemsize
        # By tokens: what each writes and reads of the memory, and what a piece's tokens do to each other.
        pairs = 0 if length == 1 else 64
        yield Entry(
            f"gated_delta_rule {requests}x{length}",
            partial(build, requests, length),
            vectors + 4 * states * heads * size * size,
            tokens * heads * (6.0 * size * size + 8.0 * pairs * size if pairs else 0.0),
        )


def _activation(shapes: Shapes) -> Iterator[Entry]:
    def silu_torch(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def apart(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.silu_mul(F.linear(x, weight))

    weight = (2 * shapes.intermediate, shapes.hidden)
    for rows in (*shapes.rows, *shapes.gated, shapes.chunk):
        moved = weight[0] * shapes.hidden + rows * (shapes.hidden + shapes.intermediate)
        yield Entry(
            f"linear_silu_mul {rows}",
            _on(shapes, kernels.linear_silu_mul, (rows, shapes.hidden), weight),
            moved * shapes.dtype.itemsize,
            flops=2.0 * rows * weight[0] * weight[1],
            peer=_on(shapes, apart, (rows, shapes.hidden), weight),
        )

    for rows in (*shapes.rows, shapes.chunk):
        plane = (rows, 2 * shapes.intermediate)
        yield Entry(
            f"silu_mul {rows}",
            _on(shapes, kernels.silu_mul, plane),
            3 * rows * shapes.intermediate * shapes.dtype.itemsize,
            peer=_on(shapes, silu_torch, plane),
            cold=False,
        )


def _sampling(shapes: Shapes) -> Iterator[Entry]:
    top_k = min(50, shapes.vocab)

    def build(rows: int, *wanted: Any) -> Call:
        settings = torch.tensor([sampling.pack_settings(*wanted, seed) for seed in range(rows)], device=shapes.device)
        return partial(
            sampling.sample,
            _random(shapes, rows, shapes.vocab).mul_(LOGIT_SPREAD),
            settings,
            None,
            torch.arange(rows, device=shapes.device),
            torch.empty(rows, dtype=torch.int64, device=shapes.device),
            torch.empty(rows, dtype=torch.int32, device=shapes.device),
        )

    def draw_torch(logits: Tensor) -> Tensor:
        values, ids = logits.float().mul(LOGIT_SPREAD / 0.8).topk(top_k, dim=-1)
        weights = values.softmax(-1)
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= 0.95, 0.0)
        # The largest of weight / Exp(1) is a draw by weight that the host need not wait for.
        return ids.gather(-1, weights.div(torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True))

    for rows in shapes.rows:
        plane = (rows, shapes.vocab)
        size = rows * shapes.vocab * shapes.dtype.itemsize
        greedy, drawn = partial(build, rows, 0.0, 1, 1.0, 0.0), partial(build, rows, 0.8, top_k, 0.95, 0.0)
        argmax = _on(shapes, partial(torch.argmax, dim=-1), plane)
        yield Entry(f"sample greedy {rows}", greedy, size, peer=argmax, cold=False)
        yield Entry(f"sample top-k top-p {rows}", drawn, size, peer=_on(shapes, draw_torch, plane), cold=False)
