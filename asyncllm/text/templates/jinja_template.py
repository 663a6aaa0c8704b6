"""JinjaTemplate renders a checkpoint's own chat template in a sandbox, as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncllm.errors import InvalidCheckpoint, InvalidMessage, InvalidParameter, short
from asyncllm.text.checkpoint_files import read_json_object

__all__ = ["JinjaTemplate", "checkpoint_template"]

MAX_CHARACTERS = 16 * 2**20
"""Maximum length of a rendered prompt. A longer one is refused during rendering."""

MAX_REASON = 500
"""Maximum length of a template's own message when it refuses messages."""

RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"})
"""Variables that the caller of `render` may not set, besides the special tokens."""

_FOR_TOOLS = "tool_use"
"""Name of the template that transformers takes for conversations with tools, if a checkpoint has one."""


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`."""

    def reason(self) -> str:
        """Return the template's message, cut, because it may contain a whole chat message."""
        text = str(self)
        return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaTemplate:
    """A compiled template."""

    def __init__(
        self, source: str, variables: Mapping[str, str], where: str, for_tools: JinjaTemplate | None = None
    ) -> None:
        """`variables`: bos_token and the like. `where` names the source in messages. `for_tools`: the checkpoint's
        other template, for conversations with tools.

        Raises InvalidCheckpoint when the template does not compile.
        """
        self._variables = dict(variables)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)
        try:
            self._template = environment.from_string(source)
            undeclared = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidCheckpoint(
                f"The chat template in {where} does not compile: {error}. Correct it, or choose a template by "
                f"ChatTemplateConfig(model_name=...)."
            ) from None
        self.source = source
        self.for_tools = for_tools
        self.reads_tools = "tools" in undeclared
        """Whether the template reads the tools that may be called."""
        self.options = frozenset(undeclared) - RESERVED - self._variables.keys()
        """Variables that the template reads and `render` accepts."""

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt text. `variables`: some of `options`, and the tools. Raises InvalidParameter for others,
        and InvalidMessage when the template refuses the messages or fails on them."""
        for name in variables:
            if name not in self.options and not (name == "tools" and self.reads_tools):
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidParameter(
                    f"The model's chat template does not read {short(name)}. Its variables are: {known}.",
                    "chat_template_kwargs",
                )
        values = {
            "tools": None,
            "documents": None,
            **self._variables,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**values):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    break
        except _RaisedByTemplate as error:
            raise InvalidMessage(f"The model's chat template refuses these messages: {error.reason()}") from None
        except SecurityError as error:
            raise InvalidMessage(
                "The model's chat template reaches for something that its sandbox forbids. The owner of the model can "
                "choose another one by ChatTemplateConfig(model_name=...)."
            ) from _bare(error)
        except Exception as error:  # A template can raise whatever its expressions raise.
            raise InvalidMessage(
                "The model's chat template fails on these messages. Send roles and contents that the model was trained "
                "on, or choose another template."
            ) from _bare(error)
        if size > MAX_CHARACTERS:
            raise InvalidMessage(
                f"The rendered prompt is longer than {MAX_CHARACTERS} characters, more than any model reads. "
                f"Send shorter messages."
            )
        return "".join(parts)


def checkpoint_template(folder: Path, variables: Mapping[str, str]) -> JinjaTemplate | None:
    """Return the template of a checkpoint: chat_template.jinja, else tokenizer_config.json, else chat_template.json.

    None if there is none. Raises InvalidCheckpoint for a damaged file.
    """
    file = folder / "chat_template.jinja"
    source = _text(file)
    if source is not None:
        other = folder / "additional_chat_templates" / f"{_FOR_TOOLS}.jinja"
        tools = _text(other)
        for_tools = None if tools is None else JinjaTemplate(tools, variables, str(other))
        return JinjaTemplate(source, variables, str(file), for_tools)
    for name in ("tokenizer_config.json", "chat_template.json"):
        where = str(folder / name)
        source, tools = _sources(read_json_object(folder / name).get("chat_template"), where)
        if source is not None:
            for_tools = None if tools is None else JinjaTemplate(tools, variables, where)
            return JinjaTemplate(source, variables, where, for_tools)
    return None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"Cannot read {file} ({error}). Check the file and its permissions.") from None


def _sources(value: object, where: str) -> tuple[str | None, str | None]:
    """Return the template in `value`, a text or the one named "default" of a list, and the list's for tools."""
    if value is None or isinstance(value, str):
        return value or None, None
    try:
        named = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        named = {}
    source = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
    if not isinstance(source, str):
        raise InvalidCheckpoint(
            f"chat_template in {where} is neither a text nor a list of named templates with one called 'default'. "
            f"Give the template by ChatTemplateConfig(chat_template=...)."
        )
    tools = named.get(_FOR_TOOLS)
    return source, tools if isinstance(tools, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _bare(error: Exception) -> Exception:
    """Return the cause of an error, for the log: without frames, which would keep the messages in memory."""
    error.__context__ = None
    return error.with_traceback(None)
