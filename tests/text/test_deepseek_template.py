"""DeepSeek-V3.2's built-in template: its tools and its reasoning, and that its calls are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import ChatTemplateConfig
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.replies.formats import reply_format
from asyncllm.text.replies.reply import Reply
from tests.text.replies.samples import said

END = "<｜end▁of▁sentence｜>"
TOOL: dict[str, Any] = {"name": "weather", "description": "Wetter für morgen", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
ARGUMENTS = {"city": "Zürich", "days": 2, "tags": ["a", "é"]}
CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["a", "é"]</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
RESULTS = "\n\n<function_results>\n<result>sun</result>\n<result>noon</result>\n</function_results>\n\n"


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TURN = [
    message("system", "S"),
    message("user", "U"),
    message("assistant", None, reasoning_content="Hm.", tool_calls=[call("weather", ARGUMENTS), call("now", {})]),
    message("tool", "sun", tool_call_id="weather"),
    message("tool", "noon", tool_call_id="now"),
]


@pytest.fixture(params=["model_name", "config.json"])
def template(request: pytest.FixtureRequest, tmp_path: Path) -> ChatTemplate:
    if request.param == "model_name":
        return ChatTemplate.open(tmp_path, ChatTemplateConfig(model_name="deepseek-v32"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))
    return ChatTemplate.open(tmp_path)


@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
def test_reasoning(template: ChatTemplate, switch: str) -> None:
    """The prompt opens it for the newest answer alone, and reasoning before the newest question is left out."""
    history = [*TURN[:2], message("assistant", "A", reasoning_content="Hm."), message("user", "V")]
    before = f"S<｜User｜>U<｜Assistant｜></think>A{END}<｜User｜>V<｜Assistant｜>"
    assert template.render(history) == before + "</think>"
    assert template.render(history, variables={switch: False}) == before + "</think>"
    assert template.render(history, variables={switch: True}) == before + "<think>"


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_and_results(template: ChatTemplate, thinks: bool) -> None:
    opened, thought = ("<think>", "<think>Hm.</think>") if thinks else ("</think>", "</think>")
    expected = f"S<｜User｜>U<｜Assistant｜>{thought}{CALLS}{END}{RESULTS}{opened}"
    assert template.render(TURN, variables={"thinking": thinks}) == expected
    answered = [*TURN, message("assistant", "A"), message("user", "V")]
    before = f"S<｜User｜>U<｜Assistant｜></think>{CALLS}{END}{RESULTS}</think>A{END}<｜User｜>V<｜Assistant｜>"
    assert template.render(answered, variables={"thinking": thinks}) == before + opened


def test_tools_are_announced_once_behind_the_system_prompt(template: ChatTemplate) -> None:
    assert template.reads_tools
    with_system, without = (template.render(each, variables={"tools": TOOLS}) for each in (TURN[:2], TURN[1:2]))
    head, _, tail = with_system.partition("## Tools\n\n")
    assert head == "S\n\n"
    listed = f"<functions>\n{json.dumps(TOOL, ensure_ascii=False)}\n</functions>\n<｜User｜>U<｜Assistant｜></think>"
    assert tail.endswith("JSONSchema format:\n" + listed)
    assert '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>' in tail
    assert without == with_system.removeprefix("S")
    assert with_system.count("## Tools") == 1


def test_an_answer_is_ended_and_continued(template: ChatTemplate) -> None:
    assert template.stop_words == (END,)
    begun = [message("user", "U"), message("assistant", "A")]
    assert template.render(begun) == "<｜User｜>U<｜Assistant｜></think>A"
    assert template.render(begun, continue_final_message=False).endswith(f"A{END}<｜Assistant｜></think>")
    assert template.render(begun[:1], add_generation_prompt=False) == "<｜User｜>U"
    assert template.continuation(begun[:1], "A", [message("user", "V")]) == f"{END}<｜User｜>V<｜Assistant｜></think>"


def test_what_it_writes_is_read(template: ChatTemplate) -> None:
    form = reply_format(template.source, None)
    reply = Reply(form, {"weather": {}, "now": {}}, inside=True)
    found = said(reply.push(f"Hm.</think>Ok.{CALLS}") + reply.end())
    assert (found.thought, found.text) == ("Hm.", "Ok.")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("weather", ARGUMENTS), ("now", {})]


def test_parts_of_the_callers_make_a_composed_one(tmp_path: Path) -> None:
    config = ChatTemplateConfig(model_name="deepseek-v3.2", user="U:")
    assert ChatTemplate.open(tmp_path, config).render([message("user", "x")]) == "U:x<｜Assistant｜></think>"
