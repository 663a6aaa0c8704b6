"""The format of a checkpoint's replies, by its chat template or by the parser names that other servers use."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from asyncllm.errors import InvalidParameter
from asyncllm.text.replies.deepseek import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2
from asyncllm.text.replies.gemma import FUNCTIONGEMMA, GEMMA4
from asyncllm.text.replies.harmony import HARMONY
from asyncllm.text.replies.llama import LLAMA3_JSON
from asyncllm.text.replies.marked_json import (
    APERTUS,
    COHERE,
    FUNCTOOLS,
    GRANITE,
    GRANITE_20B_FC,
    HERMES,
    INTERNLM,
    JAMBA,
    LONGCAT,
    MINIMAX_M1,
    NEMOTRON_JSON,
    XLAM,
)
from asyncllm.text.replies.mistral import MISTRAL
from asyncllm.text.replies.pythonic import LFM2, OLMO3, PYTHONIC
from asyncllm.text.replies.reader import ToolFormat
from asyncllm.text.replies.reply import ReplyFormat, Thinking
from asyncllm.text.replies.tagged import GLM4, GLM45, HY_V3, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["NONE", "REASONING_PARSERS", "TOOL_PARSERS", "reply_format"]

Each = TypeVar("Each")

NONE = "none"
"""The name that stands for no parser."""

TOOL_FORMATS = (
    HERMES,
    QWEN3_CODER,
    SEED_OSS,
    LLAMA3_JSON,
    PYTHONIC,
    LFM2,
    OLMO3,
    MISTRAL,
    INTERNLM,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI_K2,
    GLM45,
    GLM4,
    HY_V3,
    HARMONY,
    GEMMA4,
    FUNCTIONGEMMA,
    FUNCTOOLS,
    GRANITE,
    GRANITE_20B_FC,
    JAMBA,
    LONGCAT,
    MINIMAX_M1,
    NEMOTRON_JSON,
    XLAM,
    APERTUS,
    COHERE,
    MINIMAX_M2,
)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hermes": ("qwen", "qwen25", "qwen2d5", "qwen3", "granite4", "ernie45"),
    "qwen3_coder": ("qwen3_xml", "qwen3coder", "mimo", "step3p5", "interns2-preview"),
    "llama3_json": ("llama3", "llama4_json"),
    "pythonic": ("llama4_pythonic", "llama4"),
    "internlm": ("interns1", "intern-s1"),
    "deepseek_v3": ("deepseekv3", "deepseek-v3", "deepseek_r1"),
    "deepseek_v31": ("deepseekv31", "deepseek-v31"),
    "deepseek_v32": ("deepseekv32", "deepseek-v32", "deepseek-v3.2"),
    "deepseek_v4": ("deepseekv4", "deepseek-v4"),
    "glm45": ("glm47", "glm", "poolside_v1"),
    "jamba": ("hunyuan_a13b", "hunyuan"),
    "nemotron_json": ("llama_nemotron_json",),
    "apertus": ("apertus2509",),
    "openai": ("gpt-oss", "gpt_oss", "harmony"),
    "phi4_mini_json": ("phi4",),
    "granite": ("granite3",),
    "cohere_command3": ("cohere", "command_r"),
    "minimax_m2": ("minimax-m2",),
}

TOOL_PARSERS: Mapping[str, ToolFormat] = {
    alias: form for form in TOOL_FORMATS for alias in (form.name, *ALIASES.get(form.name, ()))
}
"""Parser name -> format of calls."""

THINK = Thinking("<think>", "</think>")
HUNYUAN_THINK = Thinking("<think>", "</think>", ("<answer>", "</answer>"))
ERNIE_THINK = Thinking("<think>", "</think>", ("<response>", "</response>"))
APERTUS_THINK = Thinking("<|inner_prefix|>", "<|inner_suffix|>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")
COHERE_THINK = Thinking(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
GEMMA4_THINK = Thinking("<|channel>thought\n", "<channel|>")
GRANITE_THINK = Thinking("Here is my thought process:", "Here is my response:")
SEED_THINK = Thinking("<seed:think>", "</seed:think>")
LONGCAT_THINK = Thinking("<longcat_think>", "</longcat_think>")
KIMI_THINK = Thinking("◁think▷", "◁/think▷")

REASONING_PARSERS: Mapping[str, Thinking | None] = {
    **dict.fromkeys(
        (
            "default",
            "deepseek_r1",
            "deepseek-r1",
            "deepseek_v3",
            "deepseek-v3",
            "deepseek_v31",
            "deepseek-v32",
            "deepseek-v4",
            "deepseek_v4",
            "qwen3",
            "qwen-qwq",
            "qwen3-thinking",
            "glm45",
            "glm47",
            "holo2",
            "intern-s1",
            "interns1",
            "mimo",
            "kimi_k2",
            "minimax_m2",
            "minimax",
            "step3",
            "step3p5",
            "poolside_v1",
            "hy_v3",
            "olmo3",
            "nano_v3",
            "nemotron_3",
            "nemotron_v3",
        ),
        THINK,
    ),
    **dict.fromkeys(("mistral", "magistral"), MISTRAL_THINK),
    **dict.fromkeys(("cohere", "cohere_command3"), COHERE_THINK),
    "gemma4": GEMMA4_THINK,
    **dict.fromkeys(("hunyuan", "hunyuan_a13b"), HUNYUAN_THINK),
    "ernie45": ERNIE_THINK,
    "apertus": APERTUS_THINK,
    "granite": GRANITE_THINK,
    "seed_oss": SEED_THINK,
    "kimi": KIMI_THINK,
    "longcat": LONGCAT_THINK,
    **dict.fromkeys(("openai_gptoss", "gpt-oss", "openai", "harmony"), None),
}
"""Parser name -> marks around the reasoning; None: harmony's channels."""

TEMPLATE_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    # Later templates of LongCat ask for calls of another form.
    (("<longcat_arg_key>",), None),
    (("<longcat_tool_call>",), LONGCAT),
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<seed:tool_call>",), SEED_OSS),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<tool_sep>", "<arg_key>"), HY_V3),
    (("<arg_key>",), GLM45),
    (("<minimax:tool_call>",), MINIMAX_M2),
    (("｜DSML｜", "function_calls"), DEEPSEEK_V32),
    (("｜DSML｜", "tool_calls"), DEEPSEEK_V4),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("<|action_start|>", "<|plugin|>"), INTERNLM),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|START_ACTION|>",), COHERE),
    (("<start_function_call>",), FUNCTIONGEMMA),
    (("<|tool_call>", "<tool_call|>"), GEMMA4),
    (("<|tool_call_start|>",), LFM2),
    (("<function_calls>",), OLMO3),
    (("functools[",), FUNCTOOLS),
    (("<|/tool_call|>",), FUNCTOOLS),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>",), HERMES),
    (("<tool_calls>", "<beginning_of_sentence>"), MINIMAX_M1),
    (("<tool_calls>",), JAMBA),
    (("<TOOLCALL>",), NEMOTRON_JSON),
    (("<function_call>",), GRANITE_20B_FC),
    (("<|tools_prefix|>",), APERTUS),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters"', "function name", "<|start_header_id|>"), LLAMA3_JSON),
    (("<|python_start|>",), PYTHONIC),
    (("[func_name1(",), PYTHONIC),
)
"""Texts that occur only in templates of a format, or of none that is implemented. The first match counts."""

THINKING_SIGNS: tuple[tuple[tuple[str, ...], Thinking], ...] = (
    (("</think>", "<answer>"), HUNYUAN_THINK),
    (("</think>", "<response>"), ERNIE_THINK),
    (("</think>",), THINK),
    (("<|inner_prefix|>",), APERTUS_THINK),
    (("[THINK]",), MISTRAL_THINK),
    (("<|START_THINKING|>",), COHERE_THINK),
    (("<|channel>thought",), GEMMA4_THINK),
    (("Here is my thought process:",), GRANITE_THINK),
    (("<seed:think>",), SEED_THINK),
    (("◁think▷",), KIMI_THINK),
    (("</longcat_think>",), LONGCAT_THINK),
)


def reply_format(
    template: str | None, tokenizer: Tokenizer | None, *, tool_parser: str | None = None, reasoning: str | None = None
) -> ReplyFormat:
    """Return the format of replies to prompts written by the Jinja `template`. Parser names take precedence over the
    template.

    Raises InvalidParameter for an unknown name.
    """
    source = template or ""
    tools = next((form for signs, form in TEMPLATE_SIGNS if all(sign in source for sign in signs)), None)
    thinking = next((each for signs, each in THINKING_SIGNS if all(sign in source for sign in signs)), None)
    if tool_parser is not None:
        tools = None if tool_parser == NONE else _named(tool_parser, TOOL_PARSERS, "tool_call_parser")
    if reasoning is not None:
        thinking = None if reasoning == NONE else _named(reasoning, REASONING_PARSERS, "reasoning_parser")
    if tools is HARMONY:
        thinking = None
    return ReplyFormat(tools, thinking, tokenizer)


def _named(name: str, known: Mapping[str, Each], field: str) -> Each:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise InvalidParameter(
        f"There is no {field.replace('_', ' ')} {name!r}.{hint} The names are: {', '.join(sorted(known))}; "
        f"{NONE!r} stands for none.",
        field,
    )
