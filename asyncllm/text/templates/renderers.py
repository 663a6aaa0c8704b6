"""Renderers write checked messages as a text: with a checkpoint's Jinja template, or one composed from parts."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.text.templates.jinja_template import JinjaTemplate
from asyncllm.text.templates.part_contents import PartContents, with_own_places, written_for_media
from asyncllm.text.templates.tool_history import ToolHistory

__all__ = ["ComposedRenderer", "Ending", "JinjaRenderer", "Renderer"]

PROBE = "[an answer]"
"""Stands in for an answer, to find out what a template writes after one."""

Ending = Literal["answer", "continued", "closed"]
"""How a text ends: with the beginning of an answer, with the assistant's last message to be continued, or with the
complete last message."""


class Renderer(Protocol):
    """Renders checked messages as a text."""

    variables: frozenset[str]
    """Names of the variables that `render` accepts."""
    source: str | None
    """Source of a Jinja template; None for any other kind."""
    reads_tools: bool
    """Whether `render` accepts `tools` too."""

    def render(self, messages: list[dict[str, Any]], ending: Ending, variables: Mapping[str, Any]) -> str:
        """Return the text. `variables`: the caller's, for templates that have some."""

    def later_turn(self, prompt: str) -> str:
        """Return one user turn that follows others, and the beginning of the answer."""


class ComposedRenderer:
    """Renders with a BaseChatTemplate, or with a user's class that has its two methods."""

    variables: frozenset[str] = frozenset()
    source: str | None = None
    reads_tools = False

    def __init__(self, name: str, template: Any) -> None:
        self._name = name
        self._template = template

    def render(self, messages: list[dict[str, Any]], ending: Ending, variables: Mapping[str, Any]) -> str:
        if variables:
            raise UnsupportedFeature(
                f"chat_template_kwargs are for a checkpoint's own template, and {self._name!r} is a built-in or "
                f"registered one, which has no variables. Leave them out.",
                "chat_template_kwargs",
            )
        if any(message["content"] is None for message in messages):
            messages = [{**message, "content": message["content"] or ""} for message in messages]
        # A user's class need not support an option unless it is used.
        option = None
        if ending == "closed":
            option = "add_generation_prompt"
        elif ending == "answer" and messages[-1]["role"] == "assistant":
            option = "continue_final_message"
        if option is None:
            return self._text(self._template.messages2prompt(messages, True))
        known = inspect.signature(self._template.messages2prompt).parameters
        if option not in known and all(each.kind is not each.VAR_KEYWORD for each in known.values()):
            raise UnsupportedFeature(
                f"The chat template {self._name!r} does not know {option}. Leave it out, or add it to the parameters "
                f"of its messages2prompt.",
                option,
            )
        return self._text(self._template.messages2prompt(messages, True, **{option: False}))

    def later_turn(self, prompt: str) -> str:
        return self._text(self._template.get_prompt(prompt, False))

    def _text(self, text: str) -> str:
        if not isinstance(text, str):  # A user's class may return anything.
            raise InvalidParameter(
                f"The chat template {self._name!r} returned {type(text).__name__}, not str. Correct its class."
            )
        return text


class JinjaRenderer:
    """Renders with a Jinja template, and does what `transformers` does around it."""

    def __init__(self, template: JinjaTemplate, meta_instruction: str | None, special: frozenset[str]) -> None:
        self._template: JinjaTemplate | PartContents = template
        self._for_tools = (
            None if template.for_tools is None else JinjaRenderer(template.for_tools, meta_instruction, special)
        )
        self._own_places: Mapping[str, str] = {}
        """The template's placeholder for images among parts, if it is given texts with marks."""
        self._options = template.options
        self.variables = template.options
        self.source: str | None = template.source
        self.reads_tools = template.reads_tools
        if self._for_tools is not None:
            self.variables |= self._for_tools.variables
            self.source = f"{self.source}\n{self._for_tools.source}"
            self.reads_tools |= self._for_tools.reads_tools
        self._meta_instruction = meta_instruction
        self._tool_history = ToolHistory(template)
        if not self._writes(PROBE):
            self._template = PartContents(template)
            if not self._writes(PROBE):
                self._template = template
        else:
            self._own_places = written_for_media(template)
        self.end_of_turn = self._end_of_turn(special)
        """The special token that the template writes after an answer. Not every checkpoint lists it as an end token."""

    def render(self, messages: list[dict[str, Any]], ending: Ending, variables: Mapping[str, Any]) -> str:
        if self._for_tools is not None:
            # Each of the two takes those variables that neither of them knows, and refuses them.
            with_tools = "tools" in variables
            other = self._options - self._for_tools.variables if with_tools else self.variables - self._options
            variables = {name: value for name, value in variables.items() if name not in other}
            if with_tools:
                return self._for_tools.render(messages, ending, variables)
        if self._meta_instruction is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._meta_instruction}, *messages]
        messages = self._tool_history.fitted(messages)
        if ending == "continued":
            return self._open_ended(messages[:-1], messages[-1], variables)
        return self._write(messages, ending == "answer", variables)

    def _write(self, messages: list[dict[str, Any]], opens_answer: bool, variables: Mapping[str, Any]) -> str:
        """Return the text of messages whose contents are texts."""
        if variables and self._own_places and isinstance(self._template, JinjaTemplate):
            marked = any(mark in (each["content"] or "") for each in messages for mark in self._own_places)
            if marked and written_for_media(self._template, variables) != self._own_places:
                # The variables change what it writes for an image, so it has to see the images.
                parted = PartContents(self._template, everywhere=False)
                return parted.render(messages, add_generation_prompt=opens_answer, variables=variables)
        text = self._template.render(messages, add_generation_prompt=opens_answer, variables=variables)
        return with_own_places(text, self._own_places) if self._own_places else text

    def _writes(self, content: str) -> bool:
        """Return whether the template writes a user's content unchanged."""
        try:
            return content in self._write([{"role": "user", "content": content}], False, {})
        except InvalidMessage:
            return False

    def _open_ended(self, messages: list[dict[str, Any]], last: dict[str, Any], variables: Mapping[str, Any]) -> str:
        """Return the text up to the end of the last message, without the tokens that close it."""
        content = last["content"] or ""
        # Drawn for each text, so that no message can contain it.
        mark = str(secrets.randbits(128))
        marked = [*messages, {**last, "content": f"{content}{mark} "}]
        text = self._write(marked, False, variables)
        at = text.rfind(mark)
        # The space after the mark is gone if the template trims contents.
        trimmed = not text.startswith(" ", at + len(mark))
        text = text[: max(at, 0)]
        if at < 0 or not text.endswith(content.lstrip()):
            raise InvalidMessage(
                "The last message is the assistant's, to be continued, but the model's chat template does not write "
                "it down as it is. End with a user message instead."
            )
        return text.rstrip() if trimmed and content.strip() else text

    def later_turn(self, prompt: str) -> str:
        first, answer, later = ({"role": role, "content": "x"} for role in ("user", "assistant", "user"))
        history = self.render([first], "answer", {}) + "x"
        whole = self.render([first, answer, {**later, "content": prompt}], "answer", {})
        if not whole.startswith(history):
            return self.render([{**later, "content": prompt}], "answer", {})
        return whole[len(history) :].removeprefix(self.end_of_turn or "")

    def _end_of_turn(self, special: frozenset[str]) -> str | None:
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self._write(turn, False, {})
        except InvalidMessage:
            return None
        _, found, tail = text.rpartition(PROBE)
        candidates = (token for token in special if found and tail.lstrip().startswith(token))
        return max(candidates, key=len, default=None)
