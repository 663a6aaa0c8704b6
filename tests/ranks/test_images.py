"""Images with the model in other processes: answers as in one, alone and divided, and what travels for them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch, PrefillRow
from asyncllm.ranks.channel import Channel
from asyncllm.ranks.messages import TakePixels, decoder_to_rank, encode_pixels
from asyncllm.ranks.step_images import LatestPixels, with_pixels, without_pixels
from tests.ranks.engines import settings
from tests.vl.checkpoints import folder_of, picture

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

GREEDY = GenerationConfig(max_new_tokens=6, temperature=0, ignore_eos=True, logprobs=0)

DECODE: Any = decoder_to_rank(lambda grammar, start: None)


def image_at(position: int, length: int, seed: int) -> PromptImage:
    pixels = np.random.default_rng(seed).standard_normal((2, 3, seed + 1), np.float32)
    return PromptImage(position=position, length=length, digest=bytes([seed]), pixels=pixels)


def test_only_the_images_of_a_chunk_travel() -> None:
    images = [image_at(2, 4, 0), image_at(8, 4, 1), image_at(20, 4, 2)]
    rows = [
        PrefillRow(slot=0, tokens=[5] * 6, position=5, sample=False, images=images),
        PrefillRow(slot=1, tokens=[5] * 4, position=8, sample=False, images=images[1:]),
        PrefillRow(slot=2, tokens=[5], position=0, sample=False),
    ]
    batch = Batch(step=1, starts=[], new_blocks=[], copies=[], prefill=rows, decode=[])
    stripped, pixels = without_pixels(batch, LatestPixels())
    assert [each is images[index].pixels for index, each in enumerate(pixels)] == [True, True]
    assert [[image.pixels for image in row.images] for row in stripped.prefill] == [[0, 1, None], [1, None], []]
    assert batch.prefill[0].images[0].pixels is images[0].pixels, "the scheduler's own row is as it was"
    taken = []
    for each in pixels:
        head, values = encode_pixels(each)
        message = DECODE(memoryview(head + bytes(values)))
        assert isinstance(message, TakePixels)
        taken.append(message)
    filled = with_pixels(stripped, taken, LatestPixels())
    assert np.array_equal(filled.prefill[0].images[0].pixels, images[0].pixels)
    assert np.array_equal(filled.prefill[1].images[0].pixels, images[1].pixels)
    assert [image.position for image in filled.prefill[0].images] == [2, 8, 20]
    assert filled.prefill[0].images[2].pixels is None
    plain = Batch(step=1, starts=[], new_blocks=[], copies=[], prefill=rows[2:], decode=[])
    assert without_pixels(plain, LatestPixels()) == (plain, [])


def test_what_ranks_have_travels_once() -> None:
    """Over random steps and little room each side has what the other one has."""
    dice = np.random.default_rng(3)
    images = [image_at(0, 4, seed) for seed in range(8)]
    here, there = LatestPixels(400), LatestPixels(400)
    sent = 0
    for step in range(200):
        rows = [
            PrefillRow(slot=slot, tokens=[5] * 4, position=0, sample=False, images=[images[dice.integers(8)]])
            for slot in range(dice.integers(1, 4))
        ]
        batch = Batch(step=step, starts=[], new_blocks=[], copies=[], prefill=rows, decode=[])
        stripped, pixels = without_pixels(batch, here)
        sent += len(pixels)
        taken = [DECODE(memoryview(b"".join(map(bytes, encode_pixels(each))))) for each in pixels]
        filled = with_pixels(stripped, taken, there)
        for row, expected in zip(filled.prefill, rows, strict=True):
            assert np.array_equal(row.images[0].pixels, expected.images[0].pixels)
        assert list(here._kept) == list(there._kept)
        assert here._num_bytes == there._num_bytes <= 400
    assert 20 < sent < 380
    roomy = LatestPixels(2**20)
    without_pixels(batch, roomy)
    assert without_pixels(batch, roomy)[1] == [], "sent once"


async def test_pixels_go_out_bit_by_bit() -> None:
    left, right = socket.socketpair()
    arrived: list[bytes] = []
    over = asyncio.Event()

    def take(data: memoryview) -> None:
        arrived.append(bytes(data))
        if len(arrived) == 2:
            over.set()

    sender = Channel(left, lambda data: None, lambda: None)
    receiver = Channel(right, take, lambda: None)
    pixels = np.random.default_rng(0).standard_normal((3, 1000, 1000), np.float32)
    head, values = encode_pixels(pixels)
    sender.send(head, tail=values)
    sender.send(b"behind it")
    await asyncio.wait_for(over.wait(), 20)
    assert arrived == [head + pixels.tobytes(), b"behind it"]
    message = DECODE(memoryview(arrived[0]))
    assert isinstance(message, TakePixels)
    assert (message.shape, bytes(message.values)) == ([3, 1000, 1000], pixels.tobytes())
    sender.close()
    receiver.close()


@pytest.mark.parametrize(("kind", "tp"), [("minicpm_v_2_5", 1), ("qwen2_vl", 2), ("cogvlm2", 2)])
async def test_answers_are_those_of_one_process(kind: str, tp: int) -> None:
    prompts: list[Any] = [
        ("what?", picture(1)),
        "text alone",
        ("which?", [picture(2, 60, 30), picture(1), picture(3)]),
        ("what?", picture(1)),
    ]
    found = []
    for fields in ({"isolated": False}, {"isolated": True, "tp": tp} if tp == 1 else {"isolated": False, "tp": tp}):
        config = settings(**fields, block_size=8, num_gpu_blocks=128, max_prefill_token_num=24)
        async with AsyncEngine(str(folder_of(kind)), config) as engine:
            answers = await engine.batch_infer(prompts, GREEDY)
            assert isinstance(answers, list)
            left = asyncio.create_task(engine.generate(prompts[2], GREEDY).response())
            await asyncio.sleep(0.05)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            async with engine.session() as session:
                await session.chat(("and?", picture(4)), GREEDY)
                answers.append(await session.chat(("and this?", picture(5)), GREEDY))
            engine.check_idle()
            found.append(answers)
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for expected, entry in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(next(iter(expected.values())) - next(iter(entry.values()))) < 1e-4
    assert found[0][0].token_ids != found[0][1].token_ids
