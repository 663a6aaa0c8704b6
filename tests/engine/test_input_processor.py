"""Requests that InputProcessor makes of a GenerationConfig, where the answers of a fake engine do not show them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.config import GenerationConfig
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.input_processor import Call
from asyncllm.protocol import SamplingParams
from asyncllm.testing import ByteTokenizer, FakeEngine
from asyncllm.testing.fake_engine import fake_parts

pytestmark = pytest.mark.anyio


async def params_of(config: GenerationConfig) -> SamplingParams:
    async with FakeEngine("ok") as engine:
        call = Call(input_ids=[1, 2], config=config)
        request = await engine._lifecycle.inputs.prepare(call, Delivery(streaming=True))
        return request.sequences[0].params


@pytest.mark.parametrize(("temperature", "used"), [(0.0, 0.0), (1e-4, 0.0), (0.999e-3, 0.0), (1e-3, 1e-3), (1.5, 1.5)])
async def test_temperatures_that_overflow_float32_are_greedy(temperature: float, used: float) -> None:
    params = await params_of(GenerationConfig(temperature=temperature))
    assert params.temperature == used


async def test_a_bad_word_is_bad_at_the_start_and_after_a_space() -> None:
    params = await params_of(GenerationConfig(bad_words=["no", "<eos>"], bad_token_ids=[7]))
    assert {(7,), tuple(b"no"), tuple(b" no")} <= set(params.bad_words)


class Watched(ByteTokenizer):
    """Remembers where it encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text, **options)


async def test_long_texts_are_encoded_in_another_thread() -> None:
    tokenizer = Watched()
    async with AsyncEngine("fake", **{**fake_parts("ok"), "tokenizer": tokenizer}) as engine:
        await engine.encode(["x" * 100, "x" * 5000])
    short, long = tokenizer.threads
    assert short is threading.current_thread() is not long
