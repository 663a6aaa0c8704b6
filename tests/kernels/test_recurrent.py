"""Short convolutions, the gated delta rule and state spaces: against loops over whole sequences, however
these come in chunks, and are cut into pieces or taken token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import Pieces, StatePlan, memory, plan_states, recurrent
from asyncllm.kernels.triton import memory as memory_launchers
from asyncllm.kernels.triton import recurrent as launchers
from asyncllm.kernels.triton import selective_scan as scan_launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, poison, random

BLOCK = 4
LENS = (11, 3, 1, 6)
LONG = (150, 33)
"""Of several pieces."""

MODULES = pytest.mark.parametrize("module", [recurrent, launchers], ids=["op", "launcher"])
MEMORIES = pytest.mark.parametrize("module", [memory, memory_launchers], ids=["op", "launcher"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@dataclass
class Chunk:
    """A step over the next tokens of some sequences."""

    tokens: Tensor
    """[T]: which of all sequences' tokens, one sequence after the other."""
    plan: StatePlan


def chunks(dice: Random, lens: tuple[int, ...] = LENS, block: int = BLOCK) -> list[Chunk]:
    """The sequences cut at random, with rows and tokens of padding, over blocks in random order."""
    width = -(-max(lens) // block)
    tables = torch.randperm(width * len(lens), generator=torch.Generator().manual_seed(dice.randrange(1000)))
    tables = tables.view(-1, width)
    starts = [sum(lens[:row]) for row in range(len(lens))]
    sizes = (0, 1, 3, 9, 9) if lens == LENS else (70, 150)
    done, found = [0] * len(lens), []
    while tuple(done) != lens:
        counts = [min(dice.choice(sizes), length - each) for each, length in zip(done, lens, strict=True)]
        tokens, places, offsets, kv_lens = [], [], [0], []
        for row, count in enumerate(counts):
            for position in range(done[row], done[row] + count):
                tokens.append(starts[row] + position)
                places.append(int(tables[row, position // block]) * block + position % block)
            done[row] += count
            offsets.append(len(tokens))
            kv_lens.append(done[row] if count else -1)
        if not tokens:
            continue
        # Two tokens of padding in a row of their own, and a row without any.
        tokens, places, kv_lens = [*tokens, 0, 1], [*places, -1, -1], [*kv_lens, 0, 0]
        offsets += [len(tokens)] * 2
        plan = plan_states(
            torch.tensor(places),
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(kv_lens, dtype=torch.int32),
            torch.cat([tables, torch.zeros(2, width, dtype=torch.int64)]).int(),
            block,
            num_serial=dice.randrange(len(kv_lens) + 1) if lens == LENS else 0,
        )
        found.append(Chunk(torch.tensor(tokens), on_device(plan)))
    return found


def on_device(plan: StatePlan) -> StatePlan:
    pieces = plan.pieces
    if pieces is not None:
        pieces = Pieces(pieces.spans.to(DEVICE), pieces.offsets.to(DEVICE), pieces.size)
    return StatePlan(*(each.to(DEVICE) for each in plan[:4]), plan.num_serial, pieces)


def by_sequence(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(LENS)


@MODULES
@DTYPES
@pytest.mark.parametrize(("size", "length", "silu"), [(70, 4, True), (513, 3, False), (5, 2, False)])
def test_short_convolution(module: Any, dtype: torch.dtype, size: int, length: int, silu: bool) -> None:
    seed = fresh_seed()
    x = random(sum(LENS), size, seed=seed, dtype=dtype)
    weight, bias = random(size, length, seed=seed + 1, dtype=dtype), random(size, seed=seed + 2, dtype=dtype)
    expected = []
    for each in by_sequence(x.float()):
        padded = torch.nn.functional.pad(each.t(), (length - 1, 0))
        y = torch.nn.functional.conv1d(padded[None], weight.float()[:, None], bias.float(), groups=size)[0].t()
        expected.append(torch.nn.functional.silu(y) if silu else y)
    state = torch.full((4 * len(LENS), length - 1, size), 1e3, dtype=dtype, device=DEVICE)
    found = torch.full_like(x, torch.nan)
    for chunk in chunks(Random(seed)):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), size), dtype=dtype)
        y = module.short_convolution(x[tokens], weight, bias, state, chunk.plan, silu=silu)
        assert y.isfinite().all()
        found[tokens[:real]] = y[:real]
    torch.testing.assert_close(found.float(), torch.cat(expected), **tolerance(dtype))


@MEMORIES
@DTYPES
@pytest.mark.parametrize(
    ("heads", "key_heads", "keys", "values", "by_key", "lens", "block"),
    [
        (2, 1, 12, 40, False, LENS, BLOCK),
        (2, 1, 12, 40, True, LENS, BLOCK),
        (1, 1, 12, 24, False, LONG, 128),
        (1, 1, 16, 8, False, LONG, 80),
        (1, 1, 16, 8, True, LONG, 80),
    ],
)
def test_gated_delta_rule(
    module: Any,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    keys: int,
    values: int,
    by_key: bool,
    lens: tuple[int, ...],
    block: int,
) -> None:
    seed = fresh_seed()
    count = sum(lens)
    q, k = (random(count, key_heads, keys, seed=seed + each, dtype=dtype) for each in range(2))
    v = random(count, heads, values, seed=seed + 2, dtype=dtype)
    decay = -random(count, heads, *((keys,) if by_key else ()), seed=seed + 3).abs()
    beta = random(count, heads, seed=seed + 4).sigmoid()
    expected = torch.zeros(count, heads, values, device=DEVICE)
    first = 0
    for length in lens:
        memory = torch.zeros(heads, keys, values, device=DEVICE)
        for token in range(first, first + length):
            for head in range(heads):
                key, query = (each[token, head * key_heads // heads].float() for each in (k, q))
                key, query = (each / (each.norm() ** 2 + 1e-6).sqrt() for each in (key, query))
                memory[head] *= decay[token, head].view(-1, 1).exp()
                memory[head] += torch.outer(key, beta[token, head] * (v[token, head].float() - key @ memory[head]))
                expected[token, head] = query @ memory[head] / keys**0.5
        first += length
    state = torch.full((-(-max(lens) // block) * len(lens), heads, keys, values), 1e3, device=DEVICE)
    found = torch.full_like(v, torch.nan)
    for chunk in chunks(Random(seed), lens, block):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), heads, values), dtype=dtype)
        o = module.gated_delta_rule(q[tokens], k[tokens], v[tokens], decay[tokens], beta[tokens], state, chunk.plan)
        assert o.isfinite().all()
        found[tokens[:real]] = o[:real]
    torch.testing.assert_close(found.float(), expected, **tolerance(dtype, expected))


@MEMORIES
@DTYPES
@pytest.mark.parametrize(
    ("heads", "groups", "size", "features", "lens", "block"),
    [(2, 1, 12, 40, LENS, BLOCK), (1, 1, 12, 24, LONG, 128), (1, 1, 16, 8, LONG, 80)],
)
def test_state_space(
    module: Any,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    features: int,
    lens: tuple[int, ...],
    block: int,
) -> None:
    seed = fresh_seed()
    count = sum(lens)
    reads, writes = (random(count, groups, size, seed=seed + each, dtype=dtype) for each in range(2))
    x = random(count, heads, features, seed=seed + 2, dtype=dtype)
    decay, sizes = -random(count, heads, seed=seed + 3).abs(), random(count, heads, seed=seed + 4).abs()
    expected = torch.zeros(count, heads, features, device=DEVICE)
    first = 0
    for length in lens:
        held = torch.zeros(heads, size, features, device=DEVICE)
        for token in range(first, first + length):
            for head in range(heads):
                write, read = (each[token, head * groups // heads].float() for each in (writes, reads))
                held[head] *= decay[token, head].exp()
                held[head] += sizes[token, head] * torch.outer(write, x[token, head].float())
                expected[token, head] = read @ held[head]
        first += length
    state = torch.full((-(-max(lens) // block) * len(lens), heads, size, features), 1e3, device=DEVICE)
    found = torch.full_like(x, torch.nan)
    for chunk in chunks(Random(seed), lens, block):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), heads, features), dtype=dtype)
        given = (each[tokens] for each in (reads, writes, x, decay, sizes))
        y = module.state_space(*given, state, chunk.plan)
        assert y.isfinite().all()
        found[tokens[:real]] = y[:real]
    torch.testing.assert_close(found.float(), expected, **tolerance(dtype, expected))


@pytest.mark.parametrize("scan", [memory.selective_scan, scan_launchers.selective_scan], ids=["op", "launcher"])
@DTYPES
@pytest.mark.parametrize(
    ("features", "size", "lens", "block"), [(11, 3, LENS, BLOCK), (5, 4, LONG, 80), (11, 1, LENS, BLOCK)]
)
def test_selective_scan(
    scan: Callable[..., Tensor],
    dtype: torch.dtype,
    features: int,
    size: int,
    lens: tuple[int, ...],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = fresh_seed()
    if DEVICE.type == "cpu":
        # The interpreter goes through a scan number by number.
        monkeypatch.setattr(scan_launchers, "TOKENS", 4)
        monkeypatch.setattr(scan_launchers, "FEATURES", 8)
    count = sum(lens)
    x = random(count, features, seed=seed, dtype=dtype)
    sizes, rates = random(count, features, seed=seed + 1).abs(), -random(features, size, seed=seed + 2).abs()
    writes, reads = (random(count, size, seed=seed + each, dtype=dtype) for each in (3, 4))
    expected = torch.zeros(count, features, device=DEVICE)
    first = 0
    for length in lens:
        held = torch.zeros(features, size, device=DEVICE)
        for token in range(first, first + length):
            held *= (sizes[token, :, None] * rates).exp()
            held += torch.outer(sizes[token] * x[token].float(), writes[token].float())
            expected[token] = held @ reads[token].float()
        first += length
    state = torch.full((-(-max(lens) // block) * len(lens), size, features), 1e3, device=DEVICE)
    found = torch.full_like(x, torch.nan)
    for chunk in chunks(Random(seed), lens, block):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), features), dtype=dtype)
        y = scan(x[tokens], sizes[tokens], rates, writes[tokens], reads[tokens], state, chunk.plan)
        assert y.isfinite().all()
        found[tokens[:real]] = y[:real]
    torch.testing.assert_close(found.float(), expected, **tolerance(dtype, expected))


def tolerance(dtype: torch.dtype, expected: Tensor | None = None) -> dict[str, float]:
    """What sums over a whole row are is rounded with their largest terms: those of `expected`."""
    if dtype == torch.float32:
        return {"rtol": 1e-4, "atol": 1e-4}
    return {"rtol": 1e-2, "atol": 1e-2 * (1.0 if expected is None else max(1.0, float(expected.abs().max())))}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 12])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_pieces_learn_what_tokens_do(delta: bool, size: int) -> None:
    """At sizes of models and tiny ones, in bfloat16: outputs, and the states at all borders."""
    seed, lens, block, heads, key_heads = fresh_seed(), (3000, 1, 517), 256, 32, 16
    blocks = -(-max(lens) // block)
    tables = torch.arange(len(lens) * blocks).view(-1, blocks)
    positions = torch.cat([torch.arange(length) for length in lens])
    rows = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
    places = tables[rows, positions // block] * block + positions % block
    ends = torch.tensor([0, *lens]).cumsum(0).int()
    count = len(places)
    q, k = (random(count, key_heads, size, seed=seed + each, dtype=torch.bfloat16) for each in range(2))
    v = random(count, heads, size, seed=seed + 2, dtype=torch.bfloat16)
    decay, weights = -0.1 * random(count, heads, seed=seed + 3).abs(), random(count, heads, seed=seed + 4).sigmoid()
    found = []
    for num_serial in (len(lens), 0):
        plan = plan_states(places, ends, torch.tensor(lens).int(), tables.int(), block, num_serial=num_serial)
        state = torch.zeros(tables.numel(), heads, size, size, device=DEVICE)
        rule = memory_launchers.gated_delta_rule if delta else memory_launchers.state_space
        found.append((rule(q, k, v, decay, weights, state, on_device(plan)).float(), state))
    for serial, pieces in zip(*found, strict=True):
        assert (serial - pieces).norm() < 1e-2 * serial.norm()


@pytest.mark.parametrize(
    "name",
    ["convolution 2048", "inputs 2048", "delta 128", "delta of features 128", "space 128", "scan 16"],
)
def test_kernels_compile_for_hopper(name: str, compile_kernels: offline.Compile) -> None:
    assert compile_kernels("compile_pointwise")[name].spilled_bytes == 0


def test_pieces_compile_for_hopper(compile_kernels: offline.Compile) -> None:
    for case in compile_kernels("compile_pieces").values():
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, case
        assert case.wgmma, case
        # Products of float32 are of three parts each, whose tiles are more than the registers hold.
        assert case.spilled_bytes <= (4096 if "fp32" in case.name else 512), case
