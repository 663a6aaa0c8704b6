"""Prompts with embeddings instead of tokens: those of the model's own table give the answer of the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidParameter, UnsupportedFeature, pipeline
from asyncllm.errors import ContextLengthExceeded
from asyncllm.locate import locate
from asyncllm.testing import FakeEngine

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

FEW = GenerationConfig(max_new_tokens=16, logprobs=1)


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The embeddings of tiny-chat's tokens, in bfloat16."""
    return load_file(locate("tiny-chat") / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=100, max_prefill_token_num=256)
    async with AsyncEngine("tiny-chat", config) as engine:
        yield engine


async def ids_of(engine: AsyncEngine, text: str) -> list[int]:
    [ids] = await engine.encode([text], do_preprocess=True, add_bos=True)
    return ids


async def test_a_whole_prompt_and_parts_of_one(engine: AsyncEngine, table: torch.Tensor) -> None:
    ids = await ids_of(engine, "What is 17 + 25?")
    of_tokens = await engine.generate(input_ids=ids, gen_config=FEW)
    assert "42" in of_tokens.text
    ranges = [(2, 5), (7, 9)]
    stand_ins = [0 if any(start <= at < end for start, end in ranges) else token for at, token in enumerate(ids)]
    parts: list[Any] = [table[ids[2:5]].float().numpy().astype(np.float16), table[ids[7:9]].float().tolist()]
    for prompt in (
        {"input_embeddings": table[ids]},
        {"input_ids": stand_ins, "input_embeddings": parts, "input_embedding_ranges": ranges},
        {"input_ids": stand_ins, "input_embeddings": parts, "input_embedding_ranges": np.array(ranges)},
    ):
        answer = await engine.generate(gen_config=FEW, **prompt)
        assert (answer.token_ids, answer.logprobs) == (of_tokens.token_ids, of_tokens.logprobs)
        assert (answer.input_token_len, answer.num_images) == (len(ids), 0)


async def test_only_equal_embeddings_share_blocks(engine: AsyncEngine, table: torch.Tensor) -> None:
    ids = (await ids_of(engine, "What is 17 + 25?")) * 40
    given = table[ids].float()
    answers = [await engine.generate(input_embeddings=given, gen_config=FEW) for _ in range(2)]
    given[3] += 1  # in the caller's memory, which is not the engine's
    answers += [await engine.generate(input_embeddings=given, gen_config=FEW)]
    answers += [await engine.generate(input_ids=[0] * len(ids), gen_config=FEW)]
    reused = [answer.cached_token_len for answer in answers]
    assert reused[1] > len(ids) // 2
    assert reused == [0, reused[1], 0, 0]
    assert answers[0].token_ids == answers[1].token_ids


async def test_logits(engine: AsyncEngine, table: torch.Tensor) -> None:
    ids = await ids_of(engine, "What is 17 + 25?")
    wanted = await engine.get_logits(ids)
    parts: dict[str, Any] = {"input_embeddings": [table[ids[2:5]]], "input_embedding_ranges": [(2, 5)]}
    for found in (
        await engine.get_logits(None, input_embeddings=table[ids]),
        await engine.get_logits([*ids[:2], 0, 0, 0, *ids[5:]], **parts),
    ):
        torch.testing.assert_close(found, wanted)


def test_logits_of_a_pipeline(table: torch.Tensor) -> None:
    with pipeline("tiny-chat", backend_config=EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=50)) as pipe:
        first, second = pipe.prepare_inputs(["What is 17 + 25?", "Hi"])["input_ids"]
        wanted = pipe.get_logits([first, second])
        parts, places = [table[first[2:5]]], [(2, 5)]
        torch.testing.assert_close(pipe.get_logits(first, parts, places)[0], wanted[0])
        found = pipe.get_logits([first, second], [parts, [table[second]]], [places, [(0, len(second))]])
        torch.testing.assert_close(found, wanted)
        with pytest.raises(InvalidParameter, match="1 entries for 2 sequences"):
            pipe.get_logits([first, second], [parts], [places])


async def test_a_child_process_gets_them(table: torch.Tensor) -> None:
    config = EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=100, isolated=True)
    async with AsyncEngine("tiny-chat", config) as engine:
        ids = await ids_of(engine, "What is 17 + 25?")
        assert "42" in (await engine.generate(input_embeddings=table[ids])).text


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ({"input_embeddings": np.ones((3, 5))}, "input_embeddings", r"\[3, 5\].*\[tokens, 256\]"),
        ({"input_embeddings": np.ones((0, 256))}, "input_embeddings", "shape"),
        ({"input_embeddings": np.ones(256)}, "input_embeddings", "shape"),
        ({"input_embeddings": np.full((2, 256), np.nan)}, "input_embeddings", "finite"),
        ({"input_embeddings": [[1.0], [1.0, 2.0]]}, "input_embeddings", "no array"),
        ({"input_embeddings": "text"}, "input_embeddings", "no array"),
        ({"input_embeddings": torch.ones(2, 256).to_sparse()}, "input_embeddings", "no array"),
        ({"input_embedding_ranges": [(0, 1)]}, "input_embedding_ranges", "there are none"),
        (
            {"input_embeddings": np.ones((1, 256)), "input_embedding_ranges": [(0, 1)]},
            "input_embedding_ranges",
            "Pass input_ids",
        ),
    ],
    ids=lambda value: None,
)
async def test_what_is_wrong_is_said(engine: AsyncEngine, prompt: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        await engine.generate(**prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, 1)], [(0, 2), (2, 4)], [(0, 1), (0, 1)], [(1, 2), (0, 1)], [(0, 1), (3, 5)], [(0, 1), (1,)], [0, 1], 5],
    ids=str,
)
async def test_ranges_that_do_not_fit(engine: AsyncEngine, ranges: Any) -> None:
    parts = [np.ones((1, 256)), np.ones((1, 256))]
    with pytest.raises(InvalidParameter):
        await engine.generate(input_ids=[5] * 4, input_embeddings=parts, input_embedding_ranges=ranges)


async def test_where_there_can_be_none(engine: AsyncEngine) -> None:
    one = np.ones((1, 256), np.float32)
    with pytest.raises(InvalidParameter, match="twice"):
        await engine.generate("Hi", input_embeddings=one)
    with pytest.raises(UnsupportedFeature, match="sessions"):
        await engine.generate(input_embeddings=one, session_id=1, sequence_end=False)
    with pytest.raises(UnsupportedFeature, match="prompt_logprobs"):
        await engine.generate(input_embeddings=one, gen_config=GenerationConfig(prompt_logprobs=1))
    with pytest.raises(ContextLengthExceeded):
        await engine.generate(input_embeddings=np.ones((engine.session_len, 256), np.float32))
    async with FakeEngine("pong") as other:
        with pytest.raises(UnsupportedFeature, match="enable_prompt_embeds=True"):
            await other.generate(input_embeddings=one)
