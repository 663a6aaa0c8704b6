"""AsyncEngine.embed over a fake executor: vectors, order, lengths, bad input, blocks and neighbours."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.errors import (
    ContextLengthExceeded,
    EngineClosed,
    InvalidMessage,
    InvalidParameter,
    InvalidRequest,
    RequestFailed,
)
from asyncllm.testing import FakeEngine, hash_hidden, hash_oracle
from asyncllm.types import Embedding, Pooling
from tests.engine.driver import expected_pooled
from tests.engine.waits import until

pytestmark = pytest.mark.anyio

TEXT = "a text to embed"


def close_to(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-12)


def length(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


async def one(engine: FakeEngine, prompt: Any, **options: Any) -> Embedding:
    embedding = await engine.embed(prompt, **options)
    assert isinstance(embedding, Embedding)
    return embedding


async def many(engine: FakeEngine, prompts: Any, **options: Any) -> list[Embedding]:
    embeddings = await engine.embed(prompts, **options)
    assert isinstance(embeddings, list)
    return embeddings


class TestVectors:
    async def test_pooling(self) -> None:
        ids = list(TEXT.encode())
        async with FakeEngine() as engine:
            last = await one(engine, TEXT, normalize=False)
            mean = await one(engine, TEXT, pooling="mean", normalize=False)
        assert last.values == hash_hidden(ids, 16)[-1]
        assert mean.values == close_to([value / len(ids) for value in expected_pooled(ids, "mean")])
        assert last.input_token_len == mean.input_token_len == len(ids)

    @pytest.mark.parametrize("pooling", ["last", "mean"])
    async def test_length_is_1_after_the_cut(self, pooling: Pooling) -> None:
        async with FakeEngine() as engine:
            raw = await one(engine, TEXT, pooling=pooling, normalize=False)
            whole = await one(engine, TEXT, pooling=pooling)
            short = await one(engine, TEXT, pooling=pooling, dimensions=5)
            raw_short = await one(engine, TEXT, pooling=pooling, dimensions=5, normalize=False)
            full = await one(engine, TEXT, pooling=pooling, dimensions=16)
        assert whole.values == close_to([value / length(raw.values) for value in raw.values])
        assert raw_short.values == raw.values[:5]
        assert short.values == close_to([value / length(raw.values[:5]) for value in raw.values[:5]])
        assert length(short.values) == pytest.approx(1.0)
        assert full == whole

    async def test_a_vector_of_zeros_stays_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("asyncllm.testing.fake_device.hash_hidden", lambda tokens, size, first: [[0.0] * size])
        async with FakeEngine(hidden_size=3) as engine:
            assert (await one(engine, TEXT)).values == [0.0] * 3

    async def test_a_text_is_encoded_as_it_is(self) -> None:
        async with FakeEngine() as engine:
            assert await one(engine, TEXT) == await one(engine, list(TEXT.encode()))

    async def test_a_list_keeps_its_order(self) -> None:
        texts = [f"text {number}" * (1 + 7 % number) for number in range(1, 40)]
        async with FakeEngine(
            backend_config=EngineConfig(max_batch_size=4, max_prefill_token_num=16), num_blocks=40
        ) as engine:
            together = await many(engine, texts, pooling="mean")
            alone = [await one(engine, text, pooling="mean") for text in texts]
            by_ids = await many(engine, [list(text.encode()) for text in texts], pooling="mean")
            mixed = await many(engine, [texts[0], list(texts[1].encode())], pooling="mean")
            single = await many(engine, [texts[0]], pooling="mean")
        for embedding, expected in zip(together, alone, strict=True):
            # Chunks are added up in another order.
            assert embedding.values == close_to(expected.values)
            assert embedding.input_token_len == expected.input_token_len
        assert [each.values for each in by_ids] == [close_to(each.values) for each in alone]
        assert [each.values for each in mixed] == [close_to(each.values) for each in alone[:2]]
        assert [each.values for each in single] == [close_to(alone[0].values)]


class TestPrefixCache:
    async def test_the_last_token_is_computed_after_cached_ones(self) -> None:
        ids = list(range(20))
        async with FakeEngine(block_size=4) as engine:
            first = await one(engine, ids)
            before = engine.stats()
            again = await one(engine, ids)
            after = engine.stats()
            longer = await one(engine, [*ids, 7], normalize=False)
        assert first == again
        assert after.cached_tokens - before.cached_tokens == 16
        assert after.prefill_tokens - before.prefill_tokens == 4
        assert longer.values == hash_hidden([*ids, 7], 16)[-1]

    async def test_a_mean_needs_every_token(self) -> None:
        ids = list(range(20))
        async with FakeEngine(block_size=4) as engine:
            await engine.generate(input_ids=ids)
            mean = await one(engine, ids, pooling="mean", normalize=False)
            assert engine.stats().cached_tokens == 0
            await engine.generate(input_ids=ids)
            assert engine.stats().cached_tokens == 16
        assert mean.values == close_to([value / 20 for value in expected_pooled(ids, "mean")])

    async def test_answers_find_the_blocks_of_embeddings(self) -> None:
        async with FakeEngine("fine", block_size=4) as engine:
            await one(engine, list(range(20)), pooling="mean")
            assert (await engine.generate(input_ids=list(range(20)))).cached_token_len == 16


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_a_preempted_prompt_is_computed_again(pooling: Pooling) -> None:
    """An older answer takes the blocks of a prompt whose chunks are half done."""
    ids = list(range(32))
    config = EngineConfig(max_prefill_token_num=2, enable_prefix_caching=False)
    async with FakeEngine(oracle=hash_oracle(256), backend_config=config, num_blocks=12, block_size=4) as engine:
        settings = GenerationConfig(max_new_tokens=24, ignore_eos=True)
        expected = await one(engine, ids, pooling=pooling)
        answer = await engine.generate("question", settings, do_preprocess=False)
        assert engine.stats().preemptions == 0
        async with engine.generate("question", settings, do_preprocess=False) as generation:
            first = await anext(generation)
            embedding = asyncio.create_task(one(engine, ids, pooling=pooling))
            rest = [token async for chunk in generation for token in chunk.token_ids]
            assert (await embedding).values == close_to(expected.values)
        assert engine.stats().preemptions > 0
        assert [*first.token_ids, *rest] == answer.token_ids


async def test_embeddings_and_answers_at_once_are_those_of_each_alone() -> None:
    settings = GenerationConfig(max_new_tokens=20, temperature=1.0, random_seed=5, logprobs=1)
    config = EngineConfig(max_batch_size=6, max_prefill_token_num=8)
    texts = [f"text {number} of several" for number in range(12)]
    async with FakeEngine(oracle=hash_oracle(256), backend_config=config, num_blocks=64) as engine:
        answers = [await engine.generate(text, settings) for text in texts]
        last = [await one(engine, text) for text in texts]
        mean = [await one(engine, text, pooling="mean") for text in texts]
        (*answers_too, last_too, mean_too) = await asyncio.gather(
            *(engine.generate(text, settings).response() for text in texts),
            many(engine, texts),
            many(engine, texts, pooling="mean"),
        )
    assert [(answer.token_ids, answer.logprobs) for answer in answers_too] == [
        (answer.token_ids, answer.logprobs) for answer in answers
    ]
    assert last_too == last
    assert [each.values for each in mean_too] == [close_to(each.values) for each in mean]


class TestBadInput:
    @pytest.mark.parametrize(
        ("prompts", "options", "error"),
        [
            ("", {}, InvalidMessage),
            ([], {}, InvalidMessage),
            ((), {}, InvalidMessage),
            ([""], {}, InvalidMessage),
            ([[]], {}, InvalidMessage),
            (["a", ""], {}, InvalidMessage),
            (None, {}, InvalidMessage),
            (42, {}, InvalidMessage),
            (b"abc", {}, InvalidMessage),
            ({"a": 1}, {}, InvalidMessage),
            ([b"abc"], {}, InvalidParameter),
            ([None], {}, InvalidParameter),
            ([{"role": "user", "content": "a"}], {}, InvalidParameter),
            (["a", 5], {}, InvalidParameter),
            ([5, "a"], {}, InvalidParameter),
            ([258], {}, InvalidParameter),
            ([-1], {}, InvalidParameter),
            ([True], {}, InvalidParameter),
            ([[1], [258]], {}, InvalidParameter),
            ("a", {"pooling": "max"}, InvalidParameter),
            ("a", {"pooling": ["mean"]}, InvalidParameter),
            ("a", {"normalize": 1}, InvalidParameter),
            ("a", {"dimensions": 0}, InvalidParameter),
            ("a", {"dimensions": -1}, InvalidParameter),
            ("a", {"dimensions": 17}, InvalidParameter),
            ("a", {"dimensions": True}, InvalidParameter),
            ("a", {"dimensions": 4.0}, InvalidParameter),
            ("a", {"dimensions": "4"}, InvalidParameter),
        ],
    )
    async def test_it_is_refused_and_the_engine_goes_on(
        self, prompts: Any, options: dict[str, Any], error: type[InvalidRequest]
    ) -> None:
        async with FakeEngine() as engine:
            with pytest.raises(error) as caught:
                await engine.embed(prompts, **options)
            if options and isinstance(caught.value, InvalidParameter):
                assert [caught.value.param] == list(options)
            assert len((await one(engine, "good")).values) == 16

    async def test_a_prompt_may_fill_the_session_and_not_more(self) -> None:
        async with FakeEngine(backend_config=EngineConfig(session_len=8)) as engine:
            assert (await one(engine, [1] * 8)).input_token_len == 8
            with pytest.raises(ContextLengthExceeded) as refused:
                await engine.embed([[1] * 8, [1] * 9])
            assert (refused.value.prompt_len, refused.value.limit) == (9, 8)
            assert "one new token" not in str(refused.value)

    async def test_a_token_that_the_model_does_not_have_is_refused(self) -> None:
        async with FakeEngine(vocab_size=200) as engine:
            with pytest.raises(InvalidMessage, match="token id 240"):
                await engine.embed("\U0001f600")

    async def test_an_engine_that_does_not_run(self) -> None:
        engine = FakeEngine()
        with pytest.raises(EngineClosed):
            await engine.embed("a")


class TestEnds:
    async def test_a_row_that_fails_ends_its_call_and_no_other(self) -> None:
        async with FakeEngine(row_failure=lambda history: "not finite" if 120 in history else None) as engine:
            expected = await one(engine, "good")
            good = asyncio.create_task(one(engine, "good"))
            with pytest.raises(RequestFailed, match="not finite"):
                await engine.embed(["fine", "x", "well"])
            assert await good == expected
            assert engine.stats().requests_failed == 1
            # Nothing of the row that failed is found by the next one.
            assert engine.stats().cached_tokens == 0

    @pytest.mark.parametrize("pooling", ["last", "mean"])
    async def test_a_cancelled_call_leaves_nothing(self, pooling: Pooling) -> None:
        config = EngineConfig(max_prefill_token_num=4, max_batch_size=2)
        async with FakeEngine(backend_config=config, latency=0.001) as engine:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await engine.embed(["x" * 100, "y" * 100, "z" * 100], pooling=pooling)
            for _ in range(4):
                await asyncio.sleep(0)
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert stats.requests_cancelled == 3
            while engine.stats().steps_in_flight:  # noqa: ASYNC110 - gauges have no event
                await asyncio.sleep(0.001)
            assert engine.stats().blocks_held == 0
            engine.check_idle()

    async def test_closing_the_engine_ends_the_call(self) -> None:
        engine = FakeEngine()
        await engine.start()
        engine.executor.pause()
        task = asyncio.create_task(one(engine, "x" * 100))
        await until(lambda: engine.stats().steps_in_flight)
        closing = asyncio.create_task(engine.close())
        with pytest.raises(EngineClosed):
            await task
        engine.executor.resume()
        await closing
