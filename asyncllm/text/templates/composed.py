"""BaseChatTemplate composes a prompt from fixed parts, one per role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from asyncllm.config import Capability
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature, short
from asyncllm.text.image_marks import IMAGE_MARK
from asyncllm.text.messages import checked_messages, checked_prompt
from asyncllm.types import Message

__all__ = ["FILLED", "BaseChatTemplate", "uncomposed"]

ROUND = "{round}"
"""In `user`, stands for the number of the user's turn, from 1."""
FILL = "<FILL>"
"""The position in a prompt that Code Llama fills in."""
FILLED = "<EOT>"
"""Ends the text that Code Llama fills in."""


class BaseChatTemplate:
    """Composes `system + text + eosys`, `user + text + eoh`, `assistant + text + eoa`, `separator` between turns.

    It is the base of the built-in templates and of templates that users register. Parts are public attributes:

    - `meta_instruction`: the system text of a conversation that has none; None: no system part.
    - `capability`: "chat", or what takes texts as they are ("completion", "python") or fills them in ("infilling").
    - `start`: the text that begins the sequence, for tokenizers that do not add it.
    - `user_after_system`: replaces `user` directly after the system part; None: `user`.
    - `generation_prompt`: replaces `assistant` at the end of a prompt; None: `assistant`.
    - `images_first`: whether images of a user's turn come before `user`.
    - `has_system`: False if the model has no system role; system texts are then left out.
    """

    def __init__(
        self,
        system: str = "",
        meta_instruction: str | None = "",
        eosys: str = "",
        user: str = "",
        eoh: str = "",
        assistant: str = "",
        eoa: str = "",
        separator: str = "",
        capability: str = "chat",
        stop_words: Sequence[str] | None = None,
        *,
        start: str = "",
        user_after_system: str | None = None,
        generation_prompt: str | None = None,
        images_first: bool = False,
        has_system: bool = True,
    ) -> None:
        if capability not in get_args(Capability):
            raise InvalidParameter(
                f"capability is {short(capability)}. It is one of {', '.join(get_args(Capability))}.", "capability"
            )
        self.system = system
        self.meta_instruction = meta_instruction
        self.eosys = eosys
        self.user = user
        self.eoh = eoh
        self.assistant = assistant
        self.eoa = eoa
        self.separator = separator
        self.capability = capability
        ends = [FILLED] if stop_words is None and capability == "infilling" else stop_words
        self.stop_words = None if ends is None else list(ends)
        self.start = start
        self.user_after_system = user_after_system
        self.generation_prompt = generation_prompt
        self.images_first = images_first
        self.has_system = has_system

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """Return one user turn and the beginning of the answer. `sequence_start=False`: it follows earlier turns."""
        message = {"role": "user", "content": checked_prompt(prompt)}
        return self.messages2prompt([message], sequence_start)

    def messages2prompt(
        self,
        messages: str | Sequence[Message],
        sequence_start: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = True,
        **_: Any,
    ) -> str:
        """Return a whole conversation. If the last message is the assistant's, the prompt ends with it, to be
        continued, unless `continue_final_message` is False: then another answer follows it.

        Raises InvalidMessage for malformed messages, UnsupportedFeature for messages of tools.
        """
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        checked = checked_messages(messages)
        if self.capability != "chat":
            return uncomposed(checked, self.capability)
        parts = [self.start if sequence_start else self.separator]
        after_system = False
        if sequence_start and self.meta_instruction is not None and checked[0]["role"] != "system":
            checked.insert(0, {"role": "system", "content": self.meta_instruction})
        turn = 1 if sequence_start else 2
        for message in checked:
            text = _plain_text(message)
            match message["role"]:
                case "system":
                    if self.has_system:
                        parts += [self.system, text, self.eosys]
                        after_system = True
                    continue
                case "user":
                    plain = self.user_after_system is None or not after_system
                    box = self.user if plain else self.user_after_system or ""
                    if self.images_first:
                        parts += [IMAGE_MARK] * text.count(IMAGE_MARK)
                        text = text.replace(IMAGE_MARK, "")
                    parts += [box.replace(ROUND, str(turn)), text, self.eoh]
                    turn += 1
                case _:
                    parts += [self.assistant, text, self.eoa, self.separator]
            after_system = False
        if add_generation_prompt:
            if continue_final_message and checked[-1]["role"] == "assistant":
                return "".join(parts[:-2])
            parts.append(self.assistant if self.generation_prompt is None else self.generation_prompt)
        return "".join(parts)


def uncomposed(messages: Sequence[Message], capability: str) -> str:
    """Return the prompt of a template that does not chat: the contents one after the other, or for "infilling" Code
    Llama's prompt for the last one, prefix first (arXiv 2308.12950, section 2.3). Raises InvalidMessage."""
    if capability != "infilling":
        return checked_prompt("".join(message["content"] or "" for message in messages))
    prompt: str = messages[-1]["content"] or ""
    prefix, mark, suffix = prompt.partition(FILL)
    if not mark or FILL in suffix:
        raise InvalidMessage(
            f"With the capability 'infilling' a prompt holds {FILL} exactly once, where text is to be filled in; this "
            f"one holds it {prompt.count(FILL)} times."
        )
    return f"<PRE> {prefix} <SUF>{suffix} <MID>"


def _plain_text(message: dict[str, Any]) -> str:
    extra = next((key for key in message if key not in ("role", "content")), None)
    if message["role"] == "tool" or extra is not None:
        what = "messages of role 'tool'" if extra is None else f"the message key {extra!r}"
        raise UnsupportedFeature(
            f"The built-in chat templates have no place for {what}. Leave it out, or use a checkpoint that "
            f"brings its own template for tools.",
            "messages",
        )
    text: str = message["content"]
    return text
