"""Bad input raises a typed error that says what is wrong; the next request is answered, and no block is lost.

The cases of settings come from the settings' own declarations; the rest is written down here. The check that no block
or request is left over runs after every test, by the fixture in conftest.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import (
    AsyncEngine,
    AsyncLLMError,
    ChatTemplateConfig,
    ContextLengthExceeded,
    EngineConfig,
    GenerationConfig,
    InvalidCheckpoint,
    InvalidMessage,
    InvalidParameter,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    SessionBusy,
    SessionNotFound,
    UnsupportedFeature,
    UnsupportedModel,
    pipeline,
)
from asyncllm.config import RequestKeywords, RequestOptions
from asyncllm.testing import FakePipeline, fake_parts
from tests.bad_values import Stranger, bad_values

DEFAULTS = (("model_name", None), ("max_batch_size", None))
"""LMDeploy's ways to ask for an engine's default."""
VOCAB = 258
POSITIONS = 4096


@pytest.fixture(scope="module")
def pipe() -> Iterator[FakePipeline]:
    with FakePipeline({"ping": "pong"}, max_position=POSITIONS, num_blocks=2048) as pipe:
        encoder, meeting = pipe._engine._lifecycle.encoder, threading.Barrier(2)

        async def start_encoding_threads() -> None:
            await asyncio.gather(*(encoder.offload(meeting.wait, sys.maxsize) for _ in range(meeting.parties)))

        pipe._loop.call(start_encoding_threads())  # Both stay for the whole module.
        yield pipe


@pytest.fixture(autouse=True)
def _a_good_request_afterwards(pipe: FakePipeline) -> Iterator[None]:
    yield
    answer = pipe("ping", GenerationConfig(stop_words=["!"]))
    assert (answer.text, answer.finish_reason) == ("pong", "stop")


def ask(pipe: FakePipeline, *arguments: Any, **options: Any) -> Any:
    """Await engine.generate in the pipeline's loop."""

    async def answer() -> Any:
        return await pipe._engine.generate(*arguments, **options)

    return pipe._loop.call(answer())


def labelled(cases: list[Any]) -> list[Any]:
    return [pytest.param(case, id=f"{index}") for index, case in enumerate(cases)]


class TestSettings:
    @pytest.mark.parametrize("case", labelled(list(bad_values(GenerationConfig))))
    def test_generation_field(self, pipe: FakePipeline, case: tuple[str, Any]) -> None:
        name, value = case
        with pytest.raises(InvalidParameter, match=name) as caught:
            ask(pipe, "ping", GenerationConfig(**{name: value}))
        assert caught.value.param == name

    @pytest.mark.parametrize("case", labelled(list(bad_values(RequestOptions))))
    def test_request_option(self, pipe: FakePipeline, case: tuple[str, Any]) -> None:
        name, value = case
        for call in (ask, lambda pipe, prompt, **options: pipe(prompt, **options)):
            with pytest.raises(InvalidParameter, match=name) as caught:
                call(pipe, "ping", **{name: value})
            assert caught.value.param == name

    def test_request_keywords_are_the_fields(self) -> None:
        assert RequestKeywords.__optional_keys__ == set(RequestOptions.__struct_fields__)

    @pytest.mark.parametrize(
        "options",
        [
            {"timeout": 0},
            {"timeout": -1.5},
            {"cache_salt": ""},
            {"cache_salt": "\ud800"},
            {"deadline": 5},
            {"Priority": 1},
            {"do_preprocess": "no"},
            {"stream_response": None},
            {"sequence_start": 0},
            {"sequence_end": "yes"},
        ],
        ids=str,
    )
    def test_request_rule(self, pipe: FakePipeline, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidParameter, match=next(iter(options))):
            ask(pipe, "ping", **options)

    @pytest.mark.parametrize("template", [None, 5, "no\0file", "[]"])
    def test_what_is_no_template(self, template: Any) -> None:
        with pytest.raises(InvalidParameter, match="JSON"):
            ChatTemplateConfig.from_json(template)

    def test_how_to_sample_is_said_in_a_config(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidParameter, match=r"Pass gen_config=GenerationConfig\(temperature=") as caught:
            ask(pipe, "ping", temperature=0.5)
        assert caught.value.param == "temperature"

    def test_variables_of_the_template_are_said_where_they_go(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidParameter, match=r"Pass chat_template_kwargs=\{'enable_thinking'"):
            ask(pipe, "ping", enable_thinking=False)

    @pytest.mark.parametrize("case", labelled([case for case in bad_values(EngineConfig) if case not in DEFAULTS]))
    def test_engine_field(self, case: tuple[str, Any]) -> None:
        name, value = case
        with pytest.raises(InvalidRequest, match=name):
            AsyncEngine("fake", EngineConfig(**{name: value}), **fake_parts())

    @pytest.mark.parametrize("case", labelled(list(bad_values(ChatTemplateConfig))))
    def test_template_field(self, case: tuple[str, Any]) -> None:
        name, value = case
        with pytest.raises(InvalidParameter, match=name):
            AsyncEngine("fake", None, ChatTemplateConfig(**{name: value}), **fake_parts())

    @pytest.mark.parametrize("config", [GenerationConfig, EngineConfig, ChatTemplateConfig])
    @pytest.mark.parametrize("name", ["max_tokens", "", "n ", "__class__", "tëmperature", 5, None])
    def test_unknown_field(self, config: type[GenerationConfig], name: Any) -> None:
        with pytest.raises(InvalidParameter, match="has no field"):
            config.from_dict({name: 1})

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"max_new_tokens": 0}, InvalidParameter),
            ({"max_new_tokens": -1}, InvalidParameter),
            ({"max_new_tokens": 2**31}, InvalidParameter),
            ({"min_new_tokens": -1}, InvalidParameter),
            ({"min_new_tokens": 9, "max_new_tokens": 8}, InvalidParameter),
            ({"random_seed": 2**64}, InvalidParameter),
            ({"random_seed": -(2**63) - 1}, InvalidParameter),
            ({"logprobs": -1}, InvalidParameter),
            ({"logprobs": 21}, InvalidParameter),
            ({"prompt_logprobs": 21}, InvalidParameter),
            ({"stop_words": [""]}, InvalidParameter),
            ({"stop_words": ["a"] * 65}, InvalidParameter),
            ({"bad_words": ["", "a"]}, InvalidParameter),
            ({"bad_words": [str(i) for i in range(65)]}, InvalidParameter),
            ({"logit_bias": dict.fromkeys(range(513), 1.0)}, InvalidParameter),
            ({"logit_bias": {VOCAB: 1.0}}, InvalidParameter),
            ({"logit_bias": {-1: 1.0}}, InvalidParameter),
            ({"logit_bias": {2**70: 1.0}}, InvalidParameter),
            ({"stop_token_ids": [VOCAB]}, InvalidParameter),
            ({"stop_token_ids": [-1]}, InvalidParameter),
            ({"stop_token_ids": [2**70]}, InvalidParameter),
            ({"bad_token_ids": [VOCAB]}, InvalidParameter),
            ({"bad_token_ids": [-5]}, InvalidParameter),
            ({"bad_words": ["\ud800"]}, InvalidParameter),
            ({"stop_words": ["a", "b\udfff"]}, InvalidParameter),
            ({"repetition_penalty": 1.18e-38}, InvalidParameter),
            ({"repetition_penalty": 5e-324}, InvalidParameter),
            ({"response_format": {"type": "json_schema"}}, InvalidParameter),
            ({"response_format": {}}, UnsupportedFeature),
        ],
        ids=str,
    )
    def test_generation_rule(self, pipe: FakePipeline, fields: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            ask(pipe, "ping", GenerationConfig(**fields))

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"tp": 0}, InvalidParameter),
            ({"tp": 65}, InvalidParameter),
            ({"eviction_type": "swap"}, InvalidParameter),
            ({"num_cpu_blocks": 8, "enable_prefix_caching": False}, InvalidParameter),
            ({"num_cpu_blocks": 2**31}, InvalidParameter),
            ({"quant_policy": 17}, InvalidParameter),
            ({"quant_policy": "int8"}, InvalidParameter),
            ({"quant_policy": True}, InvalidParameter),
            ({"adapters": {"": "b"}}, InvalidParameter),
            ({"adapters": {"a\n": "b"}}, InvalidParameter),
            ({"adapters": {"m": "b"}, "model_name": "m"}, InvalidParameter),
            ({"max_lora_rank": 8}, InvalidParameter),
            ({"lora_host_mb": 8}, InvalidParameter),
            ({"max_loras": -1}, InvalidParameter),
            ({"session_len": 1}, InvalidParameter),
            ({"session_len": 2**31}, InvalidParameter),
            ({"cache_block_seq_len": 0}, InvalidParameter),
            ({"cache_block_seq_len": 1025}, InvalidParameter),
            ({"cache_max_entry_count": 1.5}, InvalidParameter),
            ({"rope_scaling_factor": 0.5}, InvalidParameter),
            ({"max_batch_size": 4097}, InvalidParameter),
        ],
        ids=str,
    )
    def test_engine_rule(self, fields: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            AsyncEngine("fake", EngineConfig(**fields), **fake_parts())

    @pytest.mark.parametrize(
        "config", [{"top_k": 1}, "greedy", 5, EngineConfig(), GenerationConfig, Stranger()], ids=str
    )
    def test_no_generation_config_at_all(self, pipe: FakePipeline, config: Any) -> None:
        with pytest.raises(InvalidParameter, match="gen_config"):
            ask(pipe, "ping", config)

    @pytest.mark.parametrize("config", [{"tp": 1}, "fast", 5, GenerationConfig()], ids=str)
    def test_no_engine_config_at_all(self, config: Any) -> None:
        with pytest.raises(InvalidParameter, match="backend_config"):
            AsyncEngine("fake", config, **fake_parts())

    @pytest.mark.parametrize("model", ["", None, 5, b"tiny-chat", [], Stranger()], ids=str)
    def test_no_model_name(self, model: Any) -> None:
        with pytest.raises(InvalidParameter, match="model_path"):
            AsyncEngine(model)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "5", '{"model_name": 5}', '{"modelname": "x"}', "/no/such.json", "{}x"]
    )
    def test_template_json(self, text: str) -> None:
        with pytest.raises(InvalidParameter):
            ChatTemplateConfig.from_json(text)


MESSAGES = [
    "",
    None,
    5,
    b"ping",
    {"role": "user", "content": "ping"},
    [],
    [None],
    ["ping", 5],
    [{}],
    [{"role": "user"}],
    [{"content": "ping"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"type": "text"}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "sound"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}],
    [{"role": "User", "content": "ping"}],
    [{"role": "robot", "content": "ping"}],
    [{"role": 5, "content": "ping"}],
    [{"role": None, "content": "ping"}],
    [{"role": ["user"], "content": "ping"}],
    [{"role": "user", "content": "ping", "colour": "red"}],
    [{"role": "user", "content": "ping"}, "pong"],
    [{"role": "user", "content": "a\ud800b"}],
    "a\ud800b",
    {"prompt": "ping"},
    Stranger(),
    1.5,
    True,
]


class TestPrompts:
    @pytest.mark.parametrize("prompt", labelled(MESSAGES))
    def test_prompt(self, pipe: FakePipeline, prompt: Any) -> None:
        with pytest.raises((InvalidMessage, UnsupportedFeature)):
            ask(pipe, prompt)

    @pytest.mark.parametrize("prompt", labelled(MESSAGES))
    def test_the_same_inside_a_batch(self, pipe: FakePipeline, prompt: Any) -> None:
        """What can be no prompt at all raises at once; one that cannot be read fails alone."""
        before = pipe.stats().requests_finished
        if not isinstance(prompt, str | list) or "image_url" in str(prompt):
            with pytest.raises((InvalidMessage, UnsupportedFeature)):
                pipe(["ping", prompt, "ping"])
            assert pipe.stats().requests_finished == before
        else:
            good, bad, other = pipe(["ping", prompt, "ping"])
            assert (bad.finish_reason, bad.error_code, bad.token_ids) == ("error", "invalid_request", [])
            assert bad.error_message
            assert good.text == other.text == "pong"

    @pytest.mark.parametrize("ids", [[-1], [258], [5, "x"], [5, None], [True], [5, 2.0]], ids=str)
    def test_token_ids_inside_a_batch(self, pipe: FakePipeline, ids: Any) -> None:
        before = pipe.stats().requests_finished
        with pytest.raises(InvalidParameter, match="token ids are integers in"):
            pipe(["ping", ids, "ping"])
        assert pipe.stats().requests_finished == before

    def test_token_ids_are_no_prompt_of_their_own(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidMessage, match=r"Pass \[token_ids\]"):
            pipe([5])

    def test_bytes_are_no_messages(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidMessage, match="not bytes"):
            ask(pipe, b"x")

    @pytest.mark.parametrize("prompt", labelled(MESSAGES))
    def test_the_same_in_a_session(self, pipe: FakePipeline, prompt: Any) -> None:
        with pipe.session() as session:
            session.chat("ping")
            with pytest.raises((InvalidMessage, UnsupportedFeature)):
                session.chat(prompt)
            assert session.chat("ping").history == [("ping", "pong")] * 2

    @pytest.mark.parametrize("prompt", [None, 5, b"x", "", [{"role": "user", "content": "x"}], [1, 2]], ids=str)
    def test_without_template(self, pipe: FakePipeline, prompt: Any) -> None:
        with pytest.raises(InvalidMessage):
            ask(pipe, prompt, do_preprocess=False)

    @pytest.mark.parametrize("input_ids", ["123", b"123", 5, Stranger()], ids=str)
    def test_what_is_no_list_of_token_ids(self, pipe: FakePipeline, input_ids: Any) -> None:
        with pytest.raises(InvalidParameter, match=r"Encode a text first, and pass input_ids\.tolist\(\) of a tensor"):
            ask(pipe, input_ids=input_ids)

    @pytest.mark.parametrize(
        "input_ids",
        [[VOCAB], [-1], [1, 2**70], ["1"], [1.0], [True], [None], [[1]], "123", b"123", 5, {1: 2}, Stranger()],
        ids=str,
    )
    def test_token_ids(self, pipe: FakePipeline, input_ids: Any) -> None:
        with pytest.raises(InvalidParameter, match="input_ids"):
            ask(pipe, input_ids=input_ids)
        with pytest.raises(InvalidParameter):
            pipe.get_ppl([input_ids])

    def test_a_text_is_no_list_of_sequences(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidParameter, match="not str"):
            pipe.get_ppl("two words")  # type: ignore[arg-type]

    def test_no_token_ids(self, pipe: FakePipeline) -> None:
        with pytest.raises(InvalidMessage, match="no tokens"):
            ask(pipe, input_ids=[])

    @pytest.mark.parametrize("length", [POSITIONS, POSITIONS + 1, 3 * POSITIONS])
    def test_prompt_that_never_fits(self, pipe: FakePipeline, length: int) -> None:
        with pytest.raises(ContextLengthExceeded) as caught:
            ask(pipe, "x" * length, do_preprocess=False)
        assert (caught.value.prompt_len, caught.value.limit) == (length, POSITIONS - 1)

    @pytest.mark.parametrize("prompts", [5, None, b"ping", {"a": 1}, Stranger()], ids=str)
    def test_no_prompts_at_all(self, pipe: FakePipeline, prompts: Any) -> None:
        with pytest.raises(InvalidMessage):
            pipe(prompts)

    @pytest.mark.parametrize(
        "configs", labelled([[], [GenerationConfig()], [GenerationConfig()] * 3, [None, 5], [1, 2]])
    )
    def test_configs_that_do_not_match(self, pipe: FakePipeline, configs: Any) -> None:
        with pytest.raises(InvalidParameter) as caught:
            pipe(["ping", "ping"], configs)
        assert caught.value.param == "gen_config"

    @pytest.mark.parametrize("name", ["lora", "", 5])
    def test_adapters(self, pipe: FakePipeline, name: Any) -> None:
        with pytest.raises(InvalidRequest, match="adapter_name"):
            ask(pipe, "ping", adapter_name=name)


class TestSessions:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"sequence_start": False}, InvalidParameter),
            ({"sequence_end": False}, InvalidParameter),
            ({"sequence_start": False, "session_id": 987654}, SessionNotFound),
            ({"sequence_start": False, "session_id": "7"}, InvalidParameter),
            ({"sequence_start": False, "session_id": 7.0}, InvalidParameter),
            ({"sequence_start": False, "session_id": True}, InvalidParameter),
            ({"step": 3}, InvalidParameter),
            ({"step": 3, "sequence_end": False, "session_id": 987655}, InvalidParameter),
        ],
        ids=str,
    )
    def test_seed_era_parameters(self, pipe: FakePipeline, options: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            ask(pipe, "ping", **options)

    @pytest.mark.parametrize("step", [10_000, -1, "3", 1.5])
    def test_step(self, pipe: FakePipeline, step: Any) -> None:
        ask(pipe, "ping", session_id=71, sequence_end=False)
        with pytest.raises(InvalidParameter, match="step"):
            ask(pipe, "ping", session_id=71, sequence_start=False, step=step)
        pipe._loop.call(pipe._engine.end_session(71))

    @pytest.mark.parametrize("session_id", [0, -1, 987654])
    def test_ending_an_unknown_session(self, pipe: FakePipeline, session_id: int) -> None:
        with pytest.raises(SessionNotFound):
            pipe._loop.call(pipe._engine.end_session(session_id))

    def test_several_answers_in_a_session(self, pipe: FakePipeline) -> None:
        with pipe.session() as session, pytest.raises(InvalidParameter, match="n=2"):
            session.chat("ping", GenerationConfig(n=2))

    def test_ended_session(self, pipe: FakePipeline) -> None:
        session = pipe.session()
        session.close()
        for call in (lambda: session.chat("ping"), session.fork):
            with pytest.raises(SessionNotFound):
                call()

    def test_busy_session(self, pipe: FakePipeline) -> None:
        async def two_at_once() -> None:
            session = pipe._engine.session()
            async with session.chat("a" * 50):
                with pytest.raises(SessionBusy):
                    await session.chat("b")
                with pytest.raises(SessionBusy):
                    session.fork()
            session.close()

        pipe._loop.call(two_at_once())


def edit(file: str, **fields: Any) -> Callable[[Path], None]:
    """Replace entries of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text(encoding="utf-8"))
        values.update(fields)
        kept = {name: value for name, value in values.items() if value is not None}
        (folder / file).write_text(json.dumps(kept), encoding="utf-8")

    return change


def write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def cut(file: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(len(content) * keep)])

    return change


def overlap(folder: Path) -> None:
    """Let two tensors share their bytes."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second] = header[first]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], type[Exception]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), InvalidCheckpoint),
    "empty config": (write("config.json", b""), InvalidCheckpoint),
    "config of another kind": (write("config.json", b"[]"), InvalidCheckpoint),
    "config cut": (cut("config.json", 0.5), InvalidCheckpoint),
    "config is no text": (write("config.json", b"\xff\xfe\x00"), InvalidCheckpoint),
    "no architecture": (edit("config.json", architectures=None, model_type=None), InvalidCheckpoint),
    "unknown architecture": (edit("config.json", architectures=["NobodyForCausalLM"]), UnsupportedModel),
    "code asked for": (
        edit("config.json", architectures=["MyModel"], auto_map={"AutoModelForCausalLM": "my--code.MyModel"}),
        UnsupportedModel,
    ),
    "no hidden size": (edit("config.json", hidden_size=None), ModelError),
    "negative layers": (edit("config.json", num_hidden_layers=-1), ModelError),
    "heads of text": (edit("config.json", num_attention_heads="four"), ModelError),
    "heads that do not divide": (edit("config.json", num_key_value_heads=3), ModelError),
    "unknown activation": (edit("config.json", hidden_act="swoosh"), ModelError),
    "huge vocabulary": (edit("config.json", vocab_size=10**9), ModelError),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), InvalidCheckpoint),
    "empty weights": (write("model.safetensors", b""), InvalidCheckpoint),
    "weights are a pickle": (write("model.safetensors", b"\x80\x02}q\x00." * 50), InvalidCheckpoint),
    "weights cut in the header": (cut("model.safetensors", 0.0005), InvalidCheckpoint),
    "weights cut in the data": (cut("model.safetensors", 0.7), InvalidCheckpoint),
    "overlapping tensors": (overlap, InvalidCheckpoint),
    "more layers than weights": (edit("config.json", num_hidden_layers=9), ModelError),
    "fewer layers than weights": (edit("config.json", num_hidden_layers=1), ModelError),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), InvalidCheckpoint),
    "tokenizer cut": (cut("tokenizer.json", 0.5), InvalidCheckpoint),
    "tokenizer of another kind": (write("tokenizer.json", b"{}"), InvalidCheckpoint),
    "template does not compile": (edit("tokenizer_config.json", chat_template="{% if %}"), InvalidCheckpoint),
}


class TestCheckpoints:
    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_damaged(self, name: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
        damage, error = CHECKPOINTS[name]
        folder = tmp_path / "model"
        shutil.copytree(tiny_checkpoint, folder)
        damage(folder)
        with pytest.raises(error) as caught:
            open_real(folder)
        assert isinstance(caught.value, AsyncLLMError)
        assert "model" in str(caught.value)

    @pytest.mark.parametrize(
        "model", ["./nothing-here", "/no/such/folder", "nobody/no-such-model", "tiny-chatt", "a/b/c"]
    )
    def test_missing(self, model: str) -> None:
        with pytest.raises(ModelNotFound):
            open_real(model)


def open_real(model: str | Path) -> None:
    """Open a pipeline over a model, which is expected to fail."""
    pipeline(str(model), backend_config=EngineConfig(num_gpu_blocks=4)).close()


def test_there_are_at_least_three_hundred_cases() -> None:
    settings = [len(list(bad_values(config))) for config in (GenerationConfig, EngineConfig, ChatTemplateConfig)]
    assert sum(settings) + 3 * len(MESSAGES) + len(CHECKPOINTS) >= 300
    assert min(settings) > 50
