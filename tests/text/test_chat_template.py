"""Which template is chosen, what it renders, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import ChatTemplateConfig
from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.model import MODELS, BaseChatTemplate
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.templates.registry import Registry
from asyncllm.types import Message
from tests.text.conversations import JINJA, turns


@pytest.fixture
def registered() -> Iterator[Callable[[str, type[Any]], None]]:
    """Registers a class in MODELS for one test."""
    before = dict(MODELS.users)

    def register(name: str, template: type[Any]) -> None:
        MODELS.register_module(name=name, module=template)

    yield register
    MODELS.users.clear()
    MODELS.users.update(before)


@pytest.mark.parametrize(("config", "expected"), [
    (None, "checkpoint"),
    ("vicuna", "vicuna"),
    (ChatTemplateConfig("vicuna"), "vicuna"),
    (ChatTemplateConfig(model_name="vicuna"), "vicuna"),
    (ChatTemplateConfig(eoa="</end>"), "internlm2"),
    (ChatTemplateConfig(capability="completion"), "checkpoint"),
    (ChatTemplateConfig(chat_template="mine"), "checkpoint"),
])  # fmt: skip
def test_what_the_user_names_comes_first(
    checkpoint: Callable[..., Path], config: ChatTemplateConfig | str | None, expected: str
) -> None:
    folder = checkpoint({"architectures": ["InternLM2ForCausalLM"]}, chat_template=JINJA["chatml"])
    assert ChatTemplate.open(folder, config).name == expected


def test_without_jinja_the_architecture_decides_and_not_the_folders_name(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "vicuna-7b-internlm2-chat"
    shutil.copytree(checkpoint({"architectures": ["Qwen2ForCausalLM"]}), folder)
    assert ChatTemplate.open(folder).name == "qwen"
    (folder / "config.json").unlink()
    template = ChatTemplate.open(folder)
    assert template.name == "base"
    assert template.render(turns("U", "A", "V")) == "UAV"


def test_parts_override_the_builtin_template(checkpoint: Callable[..., Path]) -> None:
    config = ChatTemplateConfig(model_name="qwen", meta_instruction="You are a robot.", eoa="<eoa>", stop_words=["X"])
    template = ChatTemplate.open(checkpoint(), config)
    assert template.stop_words == ("X",)
    text = template.render(turns("U", "A", "V"))
    assert text.startswith("<|im_start|>system\nYou are a robot.<|im_end|>\n")
    assert "A<eoa>\n<|im_start|>user\nV" in text


def test_a_new_name_with_parts_is_a_new_template(checkpoint: Callable[..., Path]) -> None:
    fields = {
        "model_name": "your awesome chat template name",
        "system": "<|im_start|>system\n",
        "meta_instruction": "You are a robot developed by LMDeploy.",
        "eosys": "<|im_end|>\n",
        "user": "<|im_start|>user\n",
        "eoh": "<|im_end|>\n",
        "assistant": "<|im_start|>assistant\n",
        "eoa": "<|im_end|>",
        "separator": "\n",
        "capability": "chat",
        "stop_words": ["<|im_end|>"],
    }
    folder = checkpoint(chat_template="unused")
    (folder / "mine.json").write_text(json.dumps(fields))
    for config in (str(folder / "mine.json"), json.dumps(fields), ChatTemplateConfig.from_json(json.dumps(fields))):
        template = ChatTemplate.open(folder, config)
        assert template.name == "your awesome chat template name"
        assert template.stop_words == ("<|im_end|>",)
        assert template.render(turns("U", "A", "V")) == (
            "<|im_start|>system\nYou are a robot developed by LMDeploy.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
            "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_registered_class(checkpoint: Callable[..., Path], registered: Callable[[str, type[Any]], None]) -> None:
    class CustomizedModel(BaseChatTemplate):
        """A customized chat template."""

        def __init__(
            self,
            system: str = "<|im_start|>system\n",
            meta_instruction: str = "You are a robot developed by LMDeploy.",
            user: str = "<|im_start|>user\n",
            assistant: str = "<|im_start|>assistant\n",
            eosys: str = "<|im_end|>\n",
            eoh: str = "<|im_end|>\n",
            eoa: str = "<|im_end|>",
            separator: str = "\n",
            stop_words: tuple[str, ...] = ("<|im_end|>", "<|action_end|>"),
        ) -> None:
            super().__init__(
                system=system,
                meta_instruction=meta_instruction,
                eosys=eosys,
                user=user,
                eoh=eoh,
                assistant=assistant,
                eoa=eoa,
                separator=separator,
                stop_words=stop_words,
            )

    registered("customized_model", CustomizedModel)
    template = ChatTemplate.open(checkpoint(), ChatTemplateConfig("customized_model"))
    assert template.name == "customized_model"
    assert template.stop_words == ("<|im_end|>", "<|action_end|>")
    assert "developed by LMDeploy" in template.render([{"role": "user", "content": "who are you?"}])
    mine = ChatTemplate.open(checkpoint(), ChatTemplateConfig("customized_model", meta_instruction="Be brief."))
    assert "Be brief." in mine.get_prompt("who are you?")
    before = template.render(turns("U"))
    rest = template.continuation(turns("U"), "A", turns("V"))
    assert before + "A" + str(rest) == template.render(turns("U", "A", "V"))


def test_a_registered_class_of_its_own_kind(
    checkpoint: Callable[..., Path], registered: Callable[[str, type[Any]], None]
) -> None:
    class MyChatTemplate:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
            return f"first {prompt}" if sequence_start else f"later {prompt}"

        def messages2prompt(self, messages: Any, sequence_start: bool = True, **kwargs: Any) -> str:
            return " + ".join(message["content"] for message in messages)

    class Broken(MyChatTemplate):
        def messages2prompt(self, messages: Any, sequence_start: bool = True, **kwargs: Any) -> Any:
            return [1, 2]

    registered("awesome", MyChatTemplate)
    registered("broken", Broken)
    template = ChatTemplate.open(checkpoint(), "awesome")
    assert template.render(turns("U", "A", "V")) == "U + A + V"
    assert template.get_prompt("V", sequence_start=False) == "later V"
    assert template.stop_words == ()
    with pytest.raises(InvalidParameter, match="returned list, not str"):
        ChatTemplate.open(checkpoint(), "broken").render(turns("U"))


def test_a_jinja_template_may_be_given(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint()
    text = ChatTemplate.open(folder, ChatTemplateConfig(chat_template="{{ bos_token }}{{ messages[0].content }}"))
    assert text.render(turns("U")) == "<|bos|>U"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InvalidCheckpoint, match="no chat template"):
        ChatTemplate.open(folder, ChatTemplateConfig(model_path=str(other)))
    (other / "chat_template.jinja").write_text("other {{ messages[0].content }}")
    assert ChatTemplate.open(folder, ChatTemplateConfig(model_path=str(other))).render(turns("U")) == "other U"


def test_hf_is_the_template_of_the_checkpoint(checkpoint: Callable[..., Path]) -> None:
    own = ChatTemplate.open(checkpoint(chat_template=JINJA["chatml"]), "hf")
    assert own.render(turns("U")).startswith("<|im_start|>user\nU")
    with pytest.raises(InvalidCheckpoint, match="has none"):
        ChatTemplate.open(checkpoint(), "hf")
    with pytest.raises(InvalidParameter, match="has user, model_path, which it has no part in"):
        ChatTemplate.open(checkpoint(), ChatTemplateConfig("hf", user="U", model_path="."))


def test_the_meta_instruction_goes_into_a_jinja_template(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=JINJA["chatml"]), ChatTemplateConfig(meta_instruction="M"))
    assert template.render(turns("U")).startswith("<|im_start|>system\nM<|im_end|>\n<|im_start|>user\nU")
    own = [{"role": "system", "content": "S"}, *turns("U")]
    assert template.render(own).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU")


@pytest.mark.parametrize(("config", "reason"), [
    ("vicunna", "Did you mean vicuna"),
    (ChatTemplateConfig("no-such-name"), "no chat template 'no-such-name'"),
    (ChatTemplateConfig("qwen", chat_template="x"), "both model_name and a Jinja template"),
    (ChatTemplateConfig(chat_template="x", user="y"), "no part in"),
    (ChatTemplateConfig(capability="poetry"), "capability"),  # type: ignore[arg-type]
    ("missing.json", "Cannot read"),
    ('{"modelname": "qwen"}', "no field 'modelname'"),
    ("{not json", "not a JSON object"),
    (7, "of type int"),
])  # fmt: skip
def test_bad_settings_are_refused(checkpoint: Callable[..., Path], config: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        ChatTemplate.open(checkpoint(), config)


@pytest.mark.parametrize("name", ["checkpoint", "qwen"])
@pytest.mark.parametrize(("messages", "reason"), [
    ([], "empty"),
    ("", "list of messages"),
    (None, "list of messages"),
    ({"role": "user", "content": "x"}, "list of messages"),
    (["x"], "messages\\[0\\] is of type str"),
    ([{}], "no 'role'"),
    ([{"content": "x"}], "no 'role'"),
    ([{"role": "wizard", "content": "x"}], "unknown role 'wizard'"),
    ([{"role": ["user"], "content": "x"}], "unknown role"),
    ([{"role": "user"}], "no 'content'"),
    ([{"role": "user", "content": None}], "no 'content'"),
    ([{"role": "user", "content": 5}], "of type int"),
    ([{"role": "user", "content": b"x"}], "of type bytes"),
    ([{"role": "user", "content": ""}], "empty user message"),
    ([{"role": "user", "content": []}], "empty user message"),
    ([{"role": "user", "content": ["x"]}], "content\\[0\\]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "content\\[0\\]"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "content\\[0\\]"),
    ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "content\\[0\\]"),
    ([{"role": "user", "content": "x", "contents": "y"}], "unknown key 'contents'"),
    ([{"role": "user", "content": "x"}, {"role": "assistant"}], "messages\\[1\\] has no 'content'"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "only text"),
])  # fmt: skip
def test_bad_messages_are_refused(checkpoint: Callable[..., Path], name: str, messages: Any, reason: str) -> None:
    folder = checkpoint(chat_template=JINJA["chatml"])
    template = ChatTemplate.open(folder, None if name == "checkpoint" else name)
    kind = UnsupportedFeature if reason == "only text" else InvalidMessage
    with pytest.raises(kind, match=reason):
        template.render(messages)
    assert "U" in template.render(turns("U"))


@pytest.mark.parametrize("prompt", ["", None, 5, b"x"])
def test_bad_prompts_are_refused(checkpoint: Callable[..., Path], prompt: Any) -> None:
    with pytest.raises(InvalidMessage):
        ChatTemplate.open(checkpoint()).get_prompt(prompt)


def test_text_parts_are_joined_by_a_newline(checkpoint: Callable[..., Path]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate.open(checkpoint()).render([{"role": "user", "content": parts}]) == "one\ntwo"


def test_messages_are_not_changed(checkpoint: Callable[..., Path]) -> None:
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "a"},
    ]
    before = json.dumps(messages)
    for config in ("qwen", ChatTemplateConfig(chat_template=JINJA["chatml"])):
        template = ChatTemplate.open(checkpoint(), config)
        template.render(messages)
        template.continuation(messages, "b", turns("c"))
    assert json.dumps(messages) == before


def test_tool_messages_reach_a_jinja_template(checkpoint: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    messages = [
        *turns("U"),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    template = ChatTemplate.open(checkpoint(chat_template=source))
    assert template.render(messages) == 'user:U;assistant:[{"id": "1"}];tool:42;'


@pytest.mark.parametrize("capability", ["completion", "python"])
@pytest.mark.parametrize("config", [{}, {"model_name": "codellama"}, {"chat_template": JINJA["chatml"]}])
def test_completion_passes_the_prompt_through(
    checkpoint: Callable[..., Path], capability: Any, config: dict[str, Any]
) -> None:
    template = ChatTemplate.open(checkpoint(), ChatTemplateConfig(**config, capability=capability))
    assert template.capability == capability
    assert template.get_prompt("def f(") == "def f("
    assert template.get_prompt("def f(", sequence_start=False) == "def f("
    assert template.render(turns("def f(")) == "def f("
    assert template.continuation(turns("def f("), "x):", turns("\n    return")) == "\n    return"
    assert template.stop_words == ()
    with pytest.raises(InvalidMessage, match="empty"):
        template.get_prompt("")


def test_infilling(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(), ChatTemplateConfig("codellama", capability="infilling"))
    prompt = 'def remove_non_ascii(s: str) -> str:\n    """ <FILL>\n    return result'
    expected = '<PRE> def remove_non_ascii(s: str) -> str:\n    """  <SUF>\n    return result <MID>'
    assert template.get_prompt(prompt) == template.render(turns(prompt)) == expected
    assert template.stop_words == ("<EOT>", "▁<EOT>")
    for wrong in ("no mark", "<FILL> and <FILL>"):
        with pytest.raises(InvalidMessage, match="exactly once"):
            template.get_prompt(wrong)


def test_registries_are_apart() -> None:
    registry = Registry()
    registry.register_module(name="apart", module=BaseChatTemplate)
    assert MODELS.get("apart") is None
    assert issubclass(InvalidParameter, AsyncLLMError)
