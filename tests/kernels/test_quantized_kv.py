"""A quantized cache: what a line becomes against numpy, the ops over codes against float64 of what the codes say."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV, QuantizedKV
from asyncllm.kernels.cache import fill_kv_cache, plan_cache_write
from asyncllm.kernels.quantized_kv import FORMATS, KVFormat, Rounding, dequantize_lines, quantize_lines
from asyncllm.kernels.rotary import Rotation
from tests.kernels import offline
from tests.kernels.attention_cases import (
    SCALE,
    Pages,
    Variant,
    expected_decode,
    expected_prefill,
    generator,
    offsets_of,
)
from tests.kernels.device import DEVICE, assert_repeatable, fresh_seed, random
from tests.quant.formats import from_e4m3, to_e4m3

if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    from asyncllm.kernels.triton import cache as launchers
    from asyncllm.kernels.triton import rotary
    from asyncllm.kernels.triton.attention import decode, prefill
    from asyncllm.kernels.triton.attention import plan as planning

ALL = Variant(window=100, softcap=2.0, sinks=True, alibi=True)
FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
ROUNDINGS = {
    "int8": FORMATS["int8"].keys,
    "k5": FORMATS["k5v3"].keys,
    "v3": FORMATS["k5v3"].values,
    "fp8": FORMATS["fp8"].values,
}
ROUNDING = pytest.mark.parametrize("name", ROUNDINGS)
FIT = {"k5": 1024, "fp8": 8}
BOUNDS = {"int8": 0.5 / 127.5, "k5": 0.5 / 16 + 0.042, "v3": 0.5 / 3.625, "fp8": 1 / 16 + 17 / 16 / 15}
"""Largest error of a number, against the reach of its line (of e4m3, against the number). k5's is seen in lines of two
numbers."""


def bfloat16(x: np.ndarray, up: bool = False) -> np.ndarray:
    """float32 -> the nearest bfloat16, to even; or the next one above, of numbers from 0 on."""
    bits = x.view(np.uint32)
    bits = bits + np.uint32(0xFFFF) if up else bits + 0x7FFF + (bits >> 16 & 1)
    return (bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def expected_codes(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Lines [N, D] -> (codes, scales, middles, the numbers that these say), by the definition."""
    f = np.float32
    centre, reach, outermost = {
        "int8": (-0.5, 127.5, 127.5), "k5": (15.5, 16.0, 15.5), "v3": (3.5, 3.625, 3.5), "fp8": (0.0, 448.0, 448.0)
    }[name]  # fmt: skip
    middle = np.zeros(len(x), f)
    if name != "fp8":
        middle = bfloat16(x.min(1) * f(0.5) + x.max(1) * f(0.5))
    away = x - middle[:, None]
    scale = bfloat16(np.abs(away).max(1) * f(1 / reach), up=True)
    inverse = np.where(scale >= f(2.0**-126), f(1) / np.where(scale > 0, scale, f(1)), f(0))
    steps = away * inverse[:, None]
    if name == "fp8":
        stored = to_e4m3(np.clip(steps, -448, 448))
        numbers = from_e4m3(stored).astype(f)
    else:
        codes = np.clip(np.rint(steps + f(centre)), centre - outermost, centre + outermost)
        numbers = codes.astype(f) - f(centre)
        stored = codes.astype(np.int8 if name == "int8" else np.uint8)
    if name in FIT:
        own, said = (np.rint(steps * each * f(FIT[name])).astype(int).sum(1).astype(f) for each in (steps, numbers))
        scale = bfloat16(scale * np.where(said > 0, own / np.where(said > 0, said, f(1)), f(1)))
    return stored, scale, middle, numbers * scale[:, None] + middle[:, None]


def split_ranges(ranges: Tensor) -> tuple[np.ndarray, np.ndarray]:
    bits = ranges.cpu().numpy().view(np.uint32)
    return (bits << 16).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def lines_of(seed: int, dtype: torch.dtype, head_dim: int = 24) -> Tensor:
    """Lines of many sizes and middles, one of zeros, one constant, one far from 0, one that is tiny."""
    x = random(60, head_dim, seed=seed) * torch.logspace(-4, 4, 60)[:, None].to(DEVICE) + random(60, 1, seed=seed + 1)
    x[3], x[4], x[5], x[6] = 0, 1.7, 1000 + x[5], x[6] * 1e-30
    return x.to(dtype)


@ROUNDING
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_line_is_rounded_as_numpy_rounds_it(name: str, dtype: torch.dtype) -> None:
    x, rounding = lines_of(fresh_seed() % 1000, dtype).cpu(), ROUNDINGS[name]
    stored, scale, middle, numbers = expected_codes(x.float().numpy(), name)
    codes, ranges = quantize_lines(x, rounding)
    assert np.array_equal(codes.numpy(), stored)
    assert np.array_equal(np.stack(split_ranges(ranges)), np.stack([scale, middle]))
    back = dequantize_lines(codes, ranges, rounding)
    assert np.array_equal(back.numpy(), numbers)
    # And it is near what it was.
    error = (back - x.float()).abs()
    away = (x.float() - torch.from_numpy(middle)[:, None]).abs()
    bound = BOUNDS[name] * (away if name == "fp8" else away.amax(1, keepdim=True))
    # Scales are of eight bits, and numbers of float32 far from 0 are coarse themselves.
    smallest = torch.from_numpy(scale)[:, None] * 2.0**-10 + x.float().abs() * 2.0**-22
    assert (error <= bound * 1.01 + smallest + 1e-36).all()
    assert not back[3].any()


@pytest.mark.parametrize("name", FIT)
def test_the_error_is_at_a_right_angle_to_the_line(name: str) -> None:
    x, rounding = random(200, 64, seed=fresh_seed() % 1000).cpu() * 3 + 1, ROUNDINGS[name]

    def along(rounding: Rounding) -> Tensor:
        """What the codes say too much in the line's direction, as a part of its length."""
        codes, ranges = quantize_lines(x, rounding)
        middle = torch.from_numpy(split_ranges(ranges)[1])[:, None]
        away = x - middle
        return ((dequantize_lines(codes, ranges, rounding) - x) * away).sum(1) / away.square().sum(1)

    assert along(rounding).abs().max() < 2.0**-8
    assert along(rounding._replace(fit=0)).abs().max() > 2.0**-8


@ROUNDING
def test_a_line_with_what_is_no_number_is_none(name: str) -> None:
    rounding = ROUNDINGS[name]
    x = torch.randn(3, 16, generator=generator(1))
    x[0, 3], x[1, 9] = torch.nan, torch.inf
    codes, ranges = quantize_lines(x, rounding)
    back = dequantize_lines(codes, ranges, rounding)
    assert back[:2].isnan().all()
    assert back[2].isfinite().all()
    # Codes are read whoever wrote them; ranges are masked.
    assert dequantize_lines(codes, torch.full_like(ranges, 0x3F80), rounding).isfinite().all()


def quantized(pages: Pages, form: KVFormat, *, garbage: bool = True) -> QuantizedKV:
    """The pages in codes; contexts become what these say. What no row owns has NaN for a scale."""
    k, v = pages.cache.k, pages.cache.v
    cache = QuantizedKV.of(torch.where(k.isnan(), 1.0, k), torch.where(v.isnan(), 1.0, v), form)
    if garbage:
        cache.ranges[torch.stack([k, v]).isnan().any(-1).view(-1)] = 0x7FC0
    pages.contexts = [(said(keys, form.keys), said(values, form.values)) for keys, values in pages.contexts]
    return cache


def said(x: Tensor, rounding: Rounding) -> Tensor:
    """What the codes of x say."""
    return dequantize_lines(*quantize_lines(x, rounding), rounding)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected).norm(dim=-1)
    allowed = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[dtype]
    worst = (error / expected.norm(dim=-1).clamp(min=1e-3)).max().item()
    assert worst < allowed, worst


def make(
    form: KVFormat, lengths: list[int], tokens: int, heads: tuple[int, int], head_dim: int, page: int, **more: Any
) -> tuple[Pages, QuantizedKV, Tensor]:
    dtype = more.pop("dtype", torch.bfloat16)
    pages = Pages(lengths, page, heads[1], dtype, head_dim=head_dim, garbage=float("nan"), device=DEVICE.type, **more)
    q = torch.randn(tokens, heads[0], head_dim, generator=generator(77)).to(DEVICE, dtype)
    return pages, quantized(pages, form), q


@FORMAT
@pytest.mark.parametrize("variant", [Variant(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("lines", [0, 10**6], ids=["tiles", "gathered"])
def test_references(form: KVFormat, variant: Variant, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.kernels.attention.GATHER_LINES", lines)
    pages, cache, q = make(form, [40, 131, 1, 0], 4, (6, 2), 24, 16, dtype=torch.float32)
    plan = kernels.plan_decode_attention.reference(
        pages.block_tables, pages.kv_lens, cache, num_heads=6, window=variant.window
    )
    extras = variant.extras(6, DEVICE.type)
    found = kernels.paged_decode_attention.reference(q, cache, plan, **extras)
    assert_near(found, expected_decode(q, pages, variant), torch.float32)
    counts = [40, 20, 1, 0]
    q = torch.randn(61, 6, 24, generator=generator(8)).to(DEVICE)
    plan = kernels.plan_prefill_attention.reference(
        pages.block_tables, offsets_of(counts, DEVICE.type), pages.kv_lens, cache, num_heads=6, max_q_len=40,
        window=variant.window,
    )  # fmt: skip
    found = kernels.paged_prefill_attention.reference(q, cache, plan, **extras)
    assert_near(found, expected_prefill(q, pages, counts, variant), torch.float32)


@FORMAT
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "page", "dtype", "variant"),
    [
        ([1, 60, 150], (8, 2), 64, 16, torch.bfloat16, Variant()),
        ([300, 0, 101], (4, 1), 80, 48, torch.float16, ALL),
        ([90, 33], (3, 3), 24, 16, torch.float32, Variant(sinks=True)),
    ],
    ids=["plain", "all", "float32"],
)
def test_decode_kernel(
    form: KVFormat, lengths: list[int], heads: tuple[int, int], head_dim: int, page: int, dtype: torch.dtype,
    variant: Variant,
) -> None:  # fmt: skip
    if DEVICE.type == "cuda" and dtype == torch.float32:
        pytest.skip("refused on a GPU")
    pages, cache, q = make(form, lengths, len(lengths), heads, head_dim, page, dtype=dtype)
    plan = planning.plan_decode_attention(
        pages.block_tables, pages.kv_lens, cache, num_heads=heads[0], window=variant.window
    )
    out = torch.full_like(q, torch.nan)
    extras = variant.extras(heads[0], DEVICE.type)
    found = assert_repeatable(lambda: decode.paged_decode_attention(q, cache, plan, out=out, **extras))
    assert_near(found, expected_decode(q, pages, variant), dtype)


@FORMAT
@pytest.mark.parametrize(
    ("lengths", "counts", "heads", "head_dim", "page", "dtype", "variant"),
    [
        ([70, 130], [70, 3], (4, 1), 64, 64, torch.bfloat16, Variant()),
        ([150, 20], [50, 20], (3, 1), 24, 48, torch.float16, ALL),
        ([60, 5], [60, 5], (2, 2), 80, 16, torch.float32, Variant(window=30)),
    ],
    ids=["plain", "all", "float32"],
)
def test_prefill_kernel(
    form: KVFormat, lengths: list[int], counts: list[int], heads: tuple[int, int], head_dim: int, page: int,
    dtype: torch.dtype, variant: Variant,
) -> None:  # fmt: skip
    if DEVICE.type == "cuda" and dtype == torch.float32:
        pytest.skip("refused on a GPU")
    pages, cache, q = make(form, lengths, sum(counts), heads, head_dim, page, dtype=dtype)
    plan = planning.plan_prefill_attention(
        pages.block_tables, offsets_of(counts, DEVICE.type), pages.kv_lens, cache, num_heads=heads[0],
        max_q_len=max(counts), window=variant.window,
    )  # fmt: skip
    out = torch.full_like(q, torch.nan)
    extras = variant.extras(heads[0], DEVICE.type)
    found = assert_repeatable(lambda: prefill.paged_prefill_attention(q, cache, plan, out=out, **extras))
    assert_near(found, expected_prefill(q, pages, counts, variant), dtype)


def test_a_query_gets_the_same_bits_however_its_prompt_is_cut() -> None:
    form = FORMATS["k5v3"]
    length, heads = 150, (4, 1)
    pages, cache, q = make(form, [length, 90], length, heads, 32, 64)

    def attend(first: int, last: int, order: list[int]) -> Tensor:
        counts = [20] * (len(order) - 1) + [last - first]
        lens = torch.tensor([90] * (len(order) - 1) + [last], dtype=torch.int32, device=DEVICE)
        plan = planning.plan_prefill_attention(
            pages.block_tables[order], offsets_of(counts, DEVICE.type), lens, cache, num_heads=heads[0],
            max_q_len=max(counts), window=ALL.window, invariant=True,
        )  # fmt: skip
        rows = torch.cat([q[:20]] * (len(order) - 1) + [q[first:last]])
        return prefill.paged_prefill_attention(rows, cache, plan, **ALL.extras(4, DEVICE.type))[-(last - first) :]

    whole = attend(0, length, [0])
    assert torch.equal(attend(0, 37, [0]), whole[:37])
    assert torch.equal(attend(37, 101, [1, 0]), whole[37:101])
    for position in (0, 63, 64, 149):
        assert torch.equal(attend(position, position + 1, [0]), whole[position : position + 1])


def empty(form: KVFormat, blocks: int, kv_heads: int, page: int, head_dim: int) -> QuantizedKV:
    codes = torch.full((form.planes, blocks, kv_heads, page, head_dim), 7, dtype=form.keys.dtype, device=DEVICE)
    return QuantizedKV.over(codes, torch.full((2, blocks, kv_heads, page), 5, dtype=torch.int32, device=DEVICE), form)


def assert_same_cache(actual: QuantizedKV, expected: QuantizedKV) -> None:
    """Bit for bit; on a GPU, where sums and quotients are contracted, codes near a tie may go the other way."""
    if DEVICE.type == "cpu":
        assert torch.equal(actual.ranges, expected.ranges)
        assert torch.equal(actual.lines, expected.lines)
        return
    for found, wanted in zip(split_ranges(actual.ranges), split_ranges(expected.ranges), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2.0**-7)
    form, ones = actual.format, torch.full_like(actual.k_ranges, 0x3F80)
    for found, wanted, rounding in (
        (form.key_codes(actual.k), form.key_codes(expected.k), form.keys),
        (form.value_codes(actual.v), form.value_codes(expected.v), form.values),
    ):
        numbers, near = (dequantize_lines(codes, ones, rounding) for codes in (found, wanted))
        step = near.abs() / 7 + 2.0**-8 if form.name == "fp8" else torch.ones_like(near)
        assert ((numbers - near).abs() <= step).all()
        assert (numbers != near).float().mean() < 1e-3


@FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "page"), [(2, 64, 16), (3, 24, 5)])
def test_fill_launcher(form: KVFormat, dtype: torch.dtype, kv_heads: int, head_dim: int, page: int) -> None:
    caches = [empty(form, 9, kv_heads, page, head_dim) for _ in "ab"]
    places = torch.tensor([17, 3, 4, 9, 19, 30], device=DEVICE)
    # A part of each token's heads, as keys and values lie behind the queries.
    qkv = (random(8, 3 + 2 * kv_heads, head_dim, seed=fresh_seed() % 1000) * 3 + 1).to(dtype)
    kv = qkv[:, 3:]
    kv[7, 0, 1] = torch.nan
    fill_kv_cache.reference(kv[[0, 2, 3, 4, 6, 7]], caches[0], plan_cache_write.reference(places, caches[0]))
    padded = torch.tensor([17, -1, 3, 4, 9, -1, 19, 30], device=DEVICE)
    launchers.fill_kv_cache(kv, caches[1], launchers.plan_cache_write(padded, caches[1]))
    assert_same_cache(caches[1], caches[0])
    # Six tokens were written, and nothing else.
    assert int((caches[1].ranges != 5).sum()) == 6 * 2 * kv_heads


@FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("turned", "options"),
    [(16, {}), (16, {"norm": True}), (10, {}), (16, {"interleaved": True})],
    ids=["whole", "normed", "partial", "interleaved"],
)
def test_rope_fills_a_quantized_cache(
    form: KVFormat, dtype: torch.dtype, turned: int, options: dict[str, bool]
) -> None:
    heads, kv_heads, head_dim, tokens = 4, 2, 16, 7
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=3)
    angles = random(tokens, 1, turned // 2, seed=4).repeat(1, 1, 2)
    sin = angles.sin() * torch.tensor([-1.0, 1.0], device=DEVICE).repeat_interleave(turned // 2)
    places = torch.tensor([17, 3, 4, 9, 19, 30, 44], device=DEVICE)
    more: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    if options.get("norm"):
        more |= {"q_norm": random(head_dim, dtype=dtype, seed=5), "k_norm": random(head_dim, dtype=dtype, seed=6)}
    more["interleaved"] = options.get("interleaved", False)
    plain = PagedKV.over(torch.zeros(2, 4, kv_heads, 16, head_dim, dtype=dtype, device=DEVICE))
    expected = rotary.rope_fill_kv(qkv, Rotation(angles.cos(), sin), plain, places, **more)
    cache, wanted = (empty(form, 4, kv_heads, 16, head_dim) for _ in "ab")
    found = rotary.rope_fill_kv(qkv, Rotation(angles.cos(), sin), cache, places, **more)
    assert torch.equal(found, expected)
    blocks, offsets = places // 16, places % 16
    kv = torch.cat([plain.k[blocks, :, offsets], plain.v[blocks, :, offsets]], 1)
    fill_kv_cache.reference(kv, wanted, plan_cache_write.reference(places, wanted))
    assert_same_cache(cache, wanted)


@pytest.mark.timeout(300)
def test_kernels_compile_for_hopper(compile_kernels: offline.Compile) -> None:
    """Next to no register is spilled, and prompts are on the wide matrix instructions, which take 64 queries: heads of
    512 features leave registers for 32."""
    results = compile_kernels("compile_quantized_kv")
    for name, kernel in results.items():
        # As of the plain cache; heads of 256 in e4m3 are the one case that does not fit.
        assert kernel.spilled_bytes <= (72 if name.startswith("prefill-fp8-256") else 16), (name, kernel)
        assert kernel.shared_bytes <= offline.MAX_SHARED_BYTES, (name, kernel)
        if name.startswith("prefill"):
            assert kernel.mma if "-512-" in name else kernel.wgmma, (name, kernel)
        elif name.startswith("decode"):
            assert kernel.mma, (name, kernel)
            assert kernel.async_copies, (name, kernel)


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attention_on_gpu(form: KVFormat, head_dim: int) -> None:
    seed = fresh_seed()
    lengths = [1, 64, 65, 900, 3000, 0, 17]
    pages, cache, q = make(form, lengths, len(lengths), (16, 4), head_dim, 64, seed=seed)
    plan = planning.plan_decode_attention(pages.block_tables, pages.kv_lens, cache, num_heads=16)
    found = assert_repeatable(lambda: decode.paged_decode_attention(q, cache, plan, scale=SCALE))
    assert_near(found, expected_decode(q, pages, Variant()), torch.bfloat16)
    counts = [1, 64, 30, 300, 700, 0, 17]
    q = torch.randn(sum(counts), 16, head_dim, generator=generator(seed)).to(DEVICE, torch.bfloat16)
    for invariant in (False, True):
        plan = planning.plan_prefill_attention(
            pages.block_tables, offsets_of(counts, "cuda"), pages.kv_lens, cache, num_heads=16, max_q_len=700,
            invariant=invariant,
        )  # fmt: skip
        out = torch.full_like(q, torch.nan)
        prefill.paged_prefill_attention(q, cache, plan, scale=SCALE, out=out)
        assert_near(out, expected_prefill(q, pages, counts, Variant()), torch.bfloat16)
