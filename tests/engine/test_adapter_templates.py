"""Chat templates by adapter: registered under its name as in LMDeploy, or shipped in its folder, on tiny-chat."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, ChatTemplateConfig, EngineConfig, GenerationConfig
from asyncllm.errors import InvalidCheckpoint, InvalidParameter, UnsupportedFeature, UnsupportedModel
from asyncllm.locate import locate, locate_adapter
from asyncllm.model import BaseChatTemplate
from asyncllm.pipeline import Pipeline
from asyncllm.text.templates.registry import MODELS
from tests.server.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]


MESSAGES: list[Any] = [{"role": "user", "content": "Who are you?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}
THREE = GenerationConfig(max_new_tokens=3, temperature=0.0, ignore_eos=True)
SHIPPED = (
    "{{ bos_token }}{% for message in messages %}<|reserved_1|>{{ message.role }}: {{ message.content }}"
    "<|reserved_2|>{% endfor %}{% if add_generation_prompt %}<|reserved_1|>{% if shouts %}LOUD {% endif %}"
    "assistant: {% endif %}"
)


class Registered(BaseChatTemplate):
    """As the users of LMDeploy write them."""

    def __init__(self, **fields: Any) -> None:
        parts: dict[str, Any] = {"user": "<U>", "eoh": "</U>", "assistant": "<A>", "eoa": "</A>"}
        super().__init__(**{**parts, "meta_instruction": "Be loud.", "stop_words": ["</A>"], **fields})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "users", dict(MODELS.users))
    MODELS.register_module("named", module=Registered)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that brings its template, which takes no tools, and has tokens of its own for the ends of turns."""
    folder = tmp_path_factory.mktemp("adapters") / "shipped"
    shutil.copytree(locate_adapter("tiny-lora"), folder)
    (folder / "chat_template.jinja").write_text(SHIPPED)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|reserved_2|>"}))
    return folder


@pytest.fixture(scope="module")
def same(shipped: Path) -> Path:
    """An adapter whose folder has a copy of the model's tokenizer files, as trainers save them."""
    folder = shipped.parent / "same"
    shutil.copytree(locate_adapter("tiny-lora"), folder)
    shutil.copy(locate("tiny-chat") / "tokenizer_config.json", folder)
    return folder


def make(shipped: Path, template: ChatTemplateConfig | None = None, **more: str) -> AsyncEngine:
    adapters = {"plain": "tiny-lora", "named": "tiny-lora", "shipped": str(shipped), **more}
    return AsyncEngine("tiny-chat", EngineConfig(device_type="cpu", num_gpu_blocks=64, adapters=adapters), template)


@asynccontextmanager
async def opened(shipped: Path, template: ChatTemplateConfig | None = None, **more: str) -> AsyncIterator[AsyncEngine]:
    async with make(shipped, template, **more) as engine:
        yield engine


async def text_of(engine: AsyncEngine, name: str | None) -> str:
    ids: Any = await engine.encode([MESSAGES], adapter_name=name)
    generation = engine.generate(MESSAGES, THREE, adapter_name=name)
    await generation.start()
    assert generation.prompt_token_ids == ids[0]
    await generation
    return engine.tokenizer.decode(ids[0], skip_special_tokens=False)


BASE = "<|bos|><|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
OF_NAME = "<|bos|>Be loud.<U>Who are you?</U><A>"
OF_FOLDER = "<|bos|><|reserved_1|>user: Who are you?<|reserved_2|><|reserved_1|>assistant: "


async def test_an_adapter_has_the_template_of_its_name_or_of_its_folder(shipped: Path, same: Path) -> None:
    async with opened(shipped, same=str(same)) as engine:
        texts = {name: await text_of(engine, name) for name in (None, "plain", "same", "named", "shipped")}
        assert texts == {None: BASE, "plain": BASE, "same": BASE, "named": OF_NAME, "shipped": OF_FOLDER}
        assert engine.chat_template_of("plain") is engine.chat_template_of("same") is engine.chat_template
        with pytest.raises(InvalidParameter, match="no adapter of that name"):
            await engine.encode("Hi", adapter_name="nobody")
        # A name decides before a folder, and a template that is loaded anew is another one.
        await engine.load_adapter("named", str(shipped), replace=True)
        assert await text_of(engine, "named") == OF_NAME
        await engine.load_adapter("shipped", "tiny-lora", replace=True)
        assert await text_of(engine, "shipped") == BASE
        await engine.unload_adapter("named")
        await engine.load_adapter("vicuna", "tiny-lora")
        assert "USER: Who are you? ASSISTANT:" in await text_of(engine, "vicuna"), "a built-in name counts too"


@pytest.mark.parametrize("reached_by", ["its text", "its name"])
async def test_tokens_that_the_model_has_not_are_refused_before_a_template_writes_them(
    shipped: Path, reached_by: str, tmp_path: Path
) -> None:
    """As an end of turns that a trainer has given another text."""
    folder = tmp_path / "renamed"
    shutil.copytree(shipped, folder)
    own = {"2": {"content": "<|im_over|>"}, "9": {"content": "<|nowhere|>"}}
    written = "<|im_over|>" if reached_by == "its text" else "{{ eos_token }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_over|>", "added_tokens_decoder": own}))
    (folder / "chat_template.jinja").write_text(SHIPPED + written)
    async with opened(shipped) as engine:
        with pytest.raises(UnsupportedModel, match=r"'<\|im_over\|>'.*token 2"):
            await engine.load_adapter("renamed", str(folder))
        (folder / "chat_template.jinja").write_text(SHIPPED)
        await engine.load_adapter("renamed", str(folder))
        assert await text_of(engine, "renamed") == OF_FOLDER
    (folder / "chat_template.jinja").write_text(SHIPPED + written)
    async with opened(shipped, ChatTemplateConfig(user="[", eoh="]"), renamed=str(folder)) as engine:
        assert await text_of(engine, "renamed") == "<|bos|>[Who are you?]"


async def test_a_template_that_is_chosen_for_the_engine_is_that_of_folders_too(shipped: Path) -> None:
    async with opened(shipped, ChatTemplateConfig(user="[", eoh="]")) as engine:
        texts = [await text_of(engine, name) for name in (None, "shipped", "named")]
        assert texts == ["<|bos|>[Who are you?]", "<|bos|>[Who are you?]", OF_NAME]
    async with opened(shipped, ChatTemplateConfig(meta_instruction="Be brief.")) as engine:
        assert "<|reserved_1|>system: Be brief.<|reserved_2|>" in await text_of(engine, "shipped")


async def test_answers_end_and_are_read_as_the_template_says(shipped: Path) -> None:
    async with opened(shipped) as engine:
        assert engine.chat_template_of("shipped").stop_words == ("<|reserved_2|>",)
        end = engine.tokenizer.token_id("<|reserved_2|>")
        assert end is not None
        ends = GenerationConfig(max_new_tokens=4, temperature=0.0, logit_bias={end: 100.0})
        assert (await engine.generate(MESSAGES, ends, adapter_name="shipped")).token_ids == [end]
        for name in (None, "plain"):
            assert (await engine.generate(MESSAGES, ends, adapter_name=name)).token_ids == [end] * 4, "no end of theirs"
        # An end of its own closes a held answer as well, and only where the grammar lets it end.
        held = GenerationConfig(
            max_new_tokens=8, temperature=0.0, logit_bias={end: 100.0}, response_format={"type": "regex", "regex": "a+"}
        )
        answer = await engine.generate(MESSAGES, held, adapter_name="shipped")
        assert (set(answer.text), answer.token_ids[-1], answer.finish_reason) == ({"a"}, end, "stop")
        assert end not in (await engine.generate(MESSAGES, held)).token_ids
        # Tools and variables are those that the template reads.
        with pytest.raises(UnsupportedFeature, match="no place for tools"):
            await engine.generate(MESSAGES, THREE, adapter_name="shipped", tools=[TOOL])
        await engine.generate(MESSAGES, THREE, adapter_name="plain", tools=[TOOL])
        loud: Any = {"chat_template_kwargs": {"shouts": True}}
        ids: Any = await engine.encode([MESSAGES], adapter_name="shipped", **loud)
        assert engine.tokenizer.decode(ids[0], skip_special_tokens=False).endswith("LOUD assistant: ")
        with pytest.raises(InvalidParameter, match="shouts"):
            await engine.generate(MESSAGES, THREE, **loud)
        assert engine.reply_format_of("shipped").tools is None
        assert engine.reply_format_of("plain") is engine.reply_format


async def test_a_session_is_written_again_when_its_template_changes(shipped: Path) -> None:
    async with opened(shipped) as engine, engine.session() as session:
        first = await session.chat("One", THREE, adapter_name="shipped")
        second = await session.chat("Two", THREE, adapter_name="shipped")
        assert second.history_token_len > 0
        text = engine.tokenizer.decode(session.token_ids, skip_special_tokens=False)
        assert text.startswith(f"<|bos|><|reserved_1|>user: One<|reserved_2|><|reserved_1|>assistant: {first.text}")
        assert "<|im_start|>" not in text
        third = await session.chat("Three", THREE)
        text = engine.tokenizer.decode(session.token_ids, skip_special_tokens=False)
        said = [("user", "One"), ("assistant", first.text), ("user", "Two"), ("assistant", second.text)]
        turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in [*said, ("user", "Three")])
        assert text == f"<|bos|>{turns}<|im_start|>assistant\n{third.text}"
        ids = session.token_ids
        await session.chat("Four", THREE, adapter_name="plain")
        assert session.token_ids[: len(ids)] == ids, "the template is the same, and so are its tokens"


async def test_a_template_that_cannot_be_read_is_refused(shipped: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(shipped, broken)
    (broken / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InvalidCheckpoint, match=r"broken.*does not compile"):
        async with opened(shipped, broken=str(broken)):
            raise AssertionError
    async with opened(shipped) as engine:
        with pytest.raises(InvalidCheckpoint, match="does not compile"):
            await engine.load_adapter("broken", str(broken))
        assert "broken" not in engine.adapters
        await engine.load_adapter("broken", "tiny-lora")
        assert await text_of(engine, "broken") == BASE


def test_a_pipeline_has_them_too(shipped: Path) -> None:
    config = EngineConfig(device_type="cpu", num_gpu_blocks=64, adapters={"shipped": str(shipped)})
    with Pipeline("tiny-chat", config) as pipe:
        prompt = "Who are you?"
        long = pipe(prompt, THREE, adapter_name="shipped")
        assert long.input_token_len != pipe(prompt, THREE).input_token_len
        assert pipe.prepare_inputs(prompt, adapter_name="shipped")["input_ids"][0:1] == [1]
        assert len(pipe.prepare_inputs(prompt, adapter_name="shipped")["input_ids"]) == long.input_token_len
        session = pipe.chat(prompt, gen_config=THREE, adapter_name="shipped")
        assert session.response is not None
        assert session.response.input_token_len == long.input_token_len


async def test_over_http_the_model_names_the_template(shipped: Path) -> None:
    async with serving(make(shipped)) as served:
        sizes = {}
        for name in ("tiny-chat", "plain", "shipped", "named"):
            sizes[name] = await counts(served, name)
        assert sizes["plain"] == sizes["tiny-chat"]
        assert len({sizes[name] for name in ("plain", "shipped", "named")}) == 3
        shows = {name: (await served.post("/api/show", {"model": name}))[1]["capabilities"] for name in sizes}
        assert "tools" in shows["plain"]
        assert "tools" not in shows["shipped"]
        chat = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {"shouts": True}}
        statuses = [(await served.post("/v1/chat/completions", {"model": name, **chat}))[0] for name in sizes]
        assert statuses == [400, 400, 200, 400]


async def counts(served: Served, model: str) -> int:
    """Return the tokens of a prompt, which are the same by every route."""
    found = []
    for path, body, field in (
        ("/tokenize", {"messages": MESSAGES}, "count"),
        ("/v1/encode", {"input": "Who are you?", "do_preprocess": True}, "length"),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": "Who are you?"}, "input_tokens"),
        ("/v1/chat/interactive", {"prompt": "Who are you?", "request_output_len": 1}, "input_tokens"),
    ):
        status, answer = await served.post(path, {"model": model, **body})
        assert status == 200, json.dumps(answer)
        found.append(answer[field])
    for path, body, field in (
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "prompt_tokens"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, "input_tokens"),
        ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 1}, "input_tokens"),
    ):
        status, answer = await served.post(path, {"model": model, **body})
        assert status == 200, json.dumps(answer)
        found.append(answer["usage"][field])
    _, answer = await served.post(
        "/api/chat", {"model": model, "messages": MESSAGES, "stream": False, "options": {"num_predict": 1}}
    )
    assert set(found) == {answer["prompt_eval_count"]}, found
    return found[0]
