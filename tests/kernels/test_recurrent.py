"""Short convolutions, the gated delta rule and state spaces: against loops over whole sequences, however
these come in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import StatePlan, plan_states, recurrent
from asyncllm.kernels.triton import recurrent as launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, poison, random

BLOCK = 4
LENS = (14, 3, 1, 7)

MODULES = pytest.mark.parametrize("module", [recurrent, launchers], ids=["op", "launcher"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@dataclass
class Chunk:
    """A step over the next tokens of some sequences."""

    tokens: Tensor
    """[T]: which of all sequences' tokens, one sequence after the other."""
    plan: StatePlan


def chunks(dice: Random) -> list[Chunk]:
    """The sequences cut at random, with rows and tokens of padding, over blocks in random order."""
    tables = torch.randperm(4 * len(LENS), generator=torch.Generator().manual_seed(dice.randrange(1000))).view(-1, 4)
    starts = [sum(LENS[:row]) for row in range(len(LENS))]
    done, found = [0] * len(LENS), []
    while tuple(done) != LENS:
        counts = [min(dice.choice((0, 1, 2, 5, 9)), length - each) for each, length in zip(done, LENS, strict=True)]
        tokens, places, offsets, kv_lens = [], [], [0], []
        for row, count in enumerate(counts):
            for position in range(done[row], done[row] + count):
                tokens.append(starts[row] + position)
                places.append(int(tables[row, position // BLOCK]) * BLOCK + position % BLOCK)
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
            torch.cat([tables, torch.zeros(2, 4, dtype=torch.int64)]).int(),
            BLOCK,
        )
        found.append(Chunk(torch.tensor(tokens), StatePlan(*(each.to(DEVICE) for each in plan))))
    return found


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


@MODULES
@DTYPES
@pytest.mark.parametrize(("heads", "key_heads", "keys", "values"), [(2, 1, 12, 40), (2, 2, 16, 8)])
def test_gated_delta_rule(module: Any, dtype: torch.dtype, heads: int, key_heads: int, keys: int, values: int) -> None:
    seed = fresh_seed()
    count = sum(LENS)
    q, k = (random(count, key_heads, keys, seed=seed + each, dtype=dtype) for each in range(2))
    v = random(count, heads, values, seed=seed + 2, dtype=dtype)
    decay, beta = -random(count, heads, seed=seed + 3).abs(), random(count, heads, seed=seed + 4).sigmoid()
    expected = torch.zeros(count, heads, values, device=DEVICE)
    first = 0
    for length in LENS:
        memory = torch.zeros(heads, keys, values, device=DEVICE)
        for token in range(first, first + length):
            for head in range(heads):
                key, query = (each[token, head * key_heads // heads].float() for each in (k, q))
                key, query = (each / (each.norm() ** 2 + 1e-6).sqrt() for each in (key, query))
                memory[head] *= decay[token, head].exp()
                memory[head] += torch.outer(key, beta[token, head] * (v[token, head].float() - key @ memory[head]))
                expected[token, head] = query @ memory[head] / keys**0.5
        first += length
    state = torch.full((4 * len(LENS), heads, keys, values), 1e3, device=DEVICE)
    found = torch.full_like(v, torch.nan)
    for chunk in chunks(Random(seed)):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), heads, values), dtype=dtype)
        o = module.gated_delta_rule(q[tokens], k[tokens], v[tokens], decay[tokens], beta[tokens], state, chunk.plan)
        assert o.isfinite().all()
        found[tokens[:real]] = o[:real]
    torch.testing.assert_close(found.float(), expected, **tolerance(dtype))


@MODULES
@DTYPES
@pytest.mark.parametrize(("heads", "groups", "size", "features"), [(4, 2, 12, 40), (2, 1, 16, 8)])
def test_state_space(module: Any, dtype: torch.dtype, heads: int, groups: int, size: int, features: int) -> None:
    seed = fresh_seed()
    count = sum(LENS)
    reads, writes = (random(count, groups, size, seed=seed + each, dtype=dtype) for each in range(2))
    x = random(count, heads, features, seed=seed + 2, dtype=dtype)
    decay, sizes = -random(count, heads, seed=seed + 3).abs(), random(count, heads, seed=seed + 4).abs()
    expected = torch.zeros(count, heads, features, device=DEVICE)
    first = 0
    for length in LENS:
        held = torch.zeros(heads, size, features, device=DEVICE)
        for token in range(first, first + length):
            for head in range(heads):
                write, read = (each[token, head * groups // heads].float() for each in (writes, reads))
                held[head] *= decay[token, head].exp()
                held[head] += sizes[token, head] * torch.outer(write, x[token, head].float())
                expected[token, head] = read @ held[head]
        first += length
    state = torch.full((4 * len(LENS), heads, size, features), 1e3, device=DEVICE)
    found = torch.full_like(x, torch.nan)
    for chunk in chunks(Random(seed)):
        tokens, real = chunk.tokens.to(DEVICE), len(chunk.tokens) - 2
        poison((len(tokens), heads, features), dtype=dtype)
        given = (each[tokens] for each in (reads, writes, x, decay, sizes))
        y = module.state_space(*given, state, chunk.plan)
        assert y.isfinite().all()
        found[tokens[:real]] = y[:real]
    torch.testing.assert_close(found.float(), expected, **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}


@pytest.mark.parametrize("name", ["convolution 2048", "inputs 2048", "delta 128", "space 128"])
def test_kernels_compile_for_hopper(name: str) -> None:
    assert offline.compiled("compile_pointwise")[name].spilled_bytes == 0
