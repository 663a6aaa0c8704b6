"""Whole models and engines over a quantized cache: near the plain one, and no answer depends on where blocks are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.errors import UnsupportedFeature
from asyncllm.kernels import quantized_kv
from asyncllm.kernels.quantized_kv import FORMATS, KVFormat, Rounding
from tests.models.parity import PROMPT, TOKENS, Case, Runner, folder_of, open_case, random_tokens
from tests.quant.formats import Eight, Format, gptq, smooth_quant, write

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

BOUNDS = {"int8": 0.02, "fp8": 0.1, "k5v3": 0.3}
"""Most that logits may be off on average, against their own spread."""

PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((9, 30, 4, 17))]
DRAWN = GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=0, temperature=1.0, random_seed=1)
"""Answers that do not soon repeat themselves."""
FORKED = GenerationConfig(max_new_tokens=8, ignore_eos=True, top_k=1)
ROOM = 200


def logits_of(family: str, form: KVFormat | None) -> Tensor:
    """Of a prompt in chunks beside another row, then token by token."""
    runner = Runner(open_case(Case(family, "default")), 16, form=form)
    row, other = runner.row(random_tokens(1, TOKENS)), runner.row(random_tokens(2, TOKENS))
    runner.step((row, 50), (other, 33))
    runner.step((other, 1), (row, PROMPT - 50))
    runner.decode(row, TOKENS)
    return row.result


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).std() / wanted.std())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "glm4", "qwen3_next"])
def test_logits_are_near_those_of_a_plain_cache(family: str) -> None:
    """Windows, softcaps, sinks, ALiBi, partial rotation."""
    plain = logits_of(family, None)
    for name, form in FORMATS.items():
        found = distance(logits_of(family, form), plain)
        assert BOUNDS[name] / 20 < found < BOUNDS[name], (name, found)


def _swapped(codes: Tensor, ranges: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    return codes, ranges.roll(16, -1)


def _halves(codes: Tensor, ranges: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    return codes, (ranges << 16) | (ranges >> 16 & 0xFFFF)


def _heads(codes: Tensor, ranges: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    return codes.roll(1, 0), ranges.roll(1, 0)


def _zero_point(codes: Tensor, ranges: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    return codes + 1, ranges


@pytest.mark.parametrize(
    ("damage", "name"),
    [(_swapped, "int8"), (_swapped, "k5v3"), (_halves, "int8"), (_heads, "fp8"), (_zero_point, "k5v3")],
    ids=["scale of another token", "the same in 4 bits", "scale for middle", "another line", "off by one"],
)
def test_what_is_read_wrongly_is_seen(
    damage: Callable[..., tuple[Tensor, Tensor]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, right = logits_of("llama", None), quantized_kv.dequantize_lines
    monkeypatch.setattr(
        quantized_kv,
        "dequantize_lines",
        lambda codes, ranges, rounding: right(*damage(codes, ranges, rounding), rounding).nan_to_num_(
            posinf=1e9, neginf=-1e9
        ),
    )
    assert distance(logits_of("llama", FORMATS[name]), plain) > 1.5 * BOUNDS[name]


def new_engine(family: str = "llama", *, folder: Path | None = None, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "max_prefill_token_num": 16}
    return AsyncEngine(
        str(folder or folder_of(Case(family, "default"))),
        EngineConfig(**{**settings, "num_gpu_blocks": ROOM, **fields}),
    )


async def answer_all(engine: AsyncEngine, config: GenerationConfig = DRAWN) -> list[list[int]]:
    responses = await asyncio.gather(*(engine.generate(input_ids=each, gen_config=config) for each in PROMPTS))
    return [response.token_ids for response in responses]


@pytest.mark.parametrize(("family", "policy", "tight"), [("llama", 4, 20), ("gemma2", 8, 24), ("llama", "fp8", 20)])
async def test_where_blocks_were_changes_no_answer(family: str, policy: Any, tight: int) -> None:
    """Recomputed, copied to the host and back, shared with a neighbour, evicted to the host."""
    async with new_engine(family, quant_policy=policy) as engine:
        undisturbed = await answer_all(engine)
        assert engine.stats().preemptions == 0
        again = [await engine.generate(input_ids=each, gen_config=DRAWN) for each in PROMPTS]
        assert [each.token_ids for each in again] == undisturbed
        assert again[1].cached_token_len > 0
    copied: dict[str, Any] = {"eviction_type": "copy", "num_cpu_blocks": 40}
    for fields in ({}, copied):
        async with new_engine(family, quant_policy=policy, num_gpu_blocks=tight, **fields) as engine:
            assert await answer_all(engine) == undisturbed
            assert engine.stats().preemptions > 0
            assert not fields or engine.stats().blocks_swapped_in > 0
    async with new_engine(family) as engine:
        assert policy != 4 or await answer_all(engine) != undisturbed, "nothing was rounded"


async def test_a_session_and_its_fork() -> None:
    """Turns on kept blocks, and the same turns on none."""
    answers = []
    for kept in (True, False):
        async with new_engine(enable_prefix_caching=kept, quant_policy=4) as engine:
            session = engine.session()
            await session.chat("Once upon a time there was a small engine.", DRAWN, do_preprocess=False)
            fork = session.fork()
            turns = [each.chat("Tell me of the sea.", DRAWN, do_preprocess=False) for each in (session, fork)]
            second = [await each.response() for each in turns]
            assert [each.cached_token_len > 0 for each in second] == [kept, kept]
            answers += [each.token_ids for each in second]
    assert answers == [answers[0]] * 4


@pytest.mark.parametrize("policy", [8, 4, "fp8"])
async def test_neighbours_leave_every_bit(policy: Any) -> None:
    config = GenerationConfig(max_new_tokens=6, ignore_eos=True, logprobs=3)
    async with new_engine(batch_invariant=True, quant_policy=policy) as engine:
        alone = [await engine.generate(input_ids=each, gen_config=config, cache_salt="alone") for each in PROMPTS]
        together = await asyncio.gather(*(engine.generate(input_ids=each, gen_config=config) for each in PROMPTS))
    assert [each.logprobs for each in alone] == [each.logprobs for each in together]


@pytest.mark.parametrize(("fmt", "policy"), [(gptq(4, 32), "fp8"), (smooth_quant(), 4)], ids=["gptq", "int8"])
async def test_with_quantized_weights_too(fmt: Format | Eight, policy: Any, tmp_path: Path) -> None:
    """Copied to the host and back, asleep and woken in both ways, forked."""
    folder = write(folder_of(Case("llama", "default")), tmp_path / "model", fmt)
    answers, forks = [], []
    for fields in ({}, {"num_gpu_blocks": 20, "eviction_type": "copy", "num_cpu_blocks": 40}):
        async with new_engine(folder=folder, quant_policy=policy, **fields) as engine:
            answers.append(await answer_all(engine))
            assert not fields or engine.stats().blocks_swapped_in > 0
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wakeup()
                again = await engine.generate(input_ids=PROMPTS[2], gen_config=DRAWN)
                assert again.token_ids == answers[0][2]
            session = engine.session()
            await session.chat("Once upon a time", FORKED, do_preprocess=False)
            turns = [each.chat("there was", FORKED, do_preprocess=False) for each in (session, session.fork())]
            forks += [(await each.response()).token_ids for each in turns]
    assert answers == [answers[0]] * 2
    assert forks == [forks[0]] * 4


async def test_heads_divided_among_processes_and_sleep() -> None:
    answers = []
    for fields in ({}, {"tp": 2}):
        async with new_engine(quant_policy=8, **fields) as engine:
            answers.append(await answer_all(engine))
            await engine.sleep(2)
            await engine.wakeup()
            answers.append(await answer_all(engine))
    assert answers == [answers[0]] * 4


async def test_latents_are_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.models.build.load", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedFeature, match=r"quant_policy: the model stores one latent.*Use quant_policy=0"):
        async with new_engine("deepseek_v3", quant_policy=8):
            pass


def test_what_a_gpu_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncllm.agent.open_model import _cache_specs

    model = open_case(Case("llama", "default"))
    config = EngineConfig(quant_policy=8)
    with pytest.raises(UnsupportedFeature, match="dtype='bfloat16'"):
        _cache_specs(config, model, torch.float32, torch.device("cuda"))
    gpu = torch.device("cuda")
    assert len(_cache_specs(config, model, torch.bfloat16, gpu)) == 2
    config = EngineConfig(quant_policy="fp8")
    for capability, taken in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if taken:
            assert len(_cache_specs(config, model, torch.bfloat16, gpu)) == 2
        else:
            with pytest.raises(UnsupportedFeature, match=r"compute capability 8\.9"):
                _cache_specs(config, model, torch.bfloat16, gpu)


def test_saved_memory_is_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Llama-3-8B shape: bytes of a token, and blocks of equal memory."""
    from asyncllm.agent.cache import pool
    from asyncllm.agent.cache.layout import CacheLayout
    from asyncllm.layers.cache_spec import PagedKVSpec
    from asyncllm.layers.quantized_cache import quantized

    monkeypatch.setattr(pool, "available_memory", lambda device: 2**36)
    plain = PagedKVSpec(num_kv_heads=8, head_dim=128)
    found = {}
    for name, spec in {"": plain, **{name: quantized(plain, form) for name, form in FORMATS.items()}}.items():
        layout = CacheLayout([spec] * 32, 64, torch.bfloat16)
        config = EngineConfig(max_batch_size=4096)
        blocks = pool.pool_blocks(config, layout, max_position=2**17, device=torch.device("cuda"))
        found[name] = (layout.block_bytes // 64, blocks)
    assert [size for size, _ in found.values()] == [131_072, 67_584, 34_816, 67_584]
    ratios = [round(blocks / found[""][1], 2) for _, blocks in found.values()]
    assert ratios == [1.0, 1.94, 3.76, 1.94]


def test_every_way_to_say_it(tmp_path: Path) -> None:
    assert [EngineConfig(quant_policy=each).checked().kv_format for each in (0, 8, 4, 16, "fp8")] == [
        None, "int8", "k5v3", "fp8", "fp8",
    ]  # fmt: skip
