"""ChatTemplateConfig: the chat template to use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from asyncllm.config.lmdeploy_settings import TEMPLATES
from asyncllm.config.settings import Settings
from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import InvalidParameter

__all__ = ["PARTS", "Capability", "ChatTemplateConfig"]

PARTS = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator")
"""Fields of ChatTemplateConfig that only a composed template has."""

Capability = Literal["completion", "chat", "infilling", "python"]


class ChatTemplateConfig(Settings, frozen=True):
    """The chat template to use, and its parts to replace.

    A built-in template composes a conversation as `system + meta_instruction + eosys`, then for each turn
    `user + text + eoh`, `assistant + text + eoa`, with `separator` between turns.
    """

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = TEMPLATES

    model_name: Annotated[
        str | None,
        Meta(description="Name of a built-in or registered template (`asyncllm list`), or `hf`: the checkpoint's own."),
    ] = None
    model_path: Annotated[str | None, Meta(description="Folder whose Jinja template to use.")] = None
    system: Annotated[str | None, Meta(description="Before the system text.")] = None
    meta_instruction: Annotated[str | None, Meta(description="System text when the conversation has none.")] = None
    eosys: Annotated[str | None, Meta(description="After the system text.")] = None
    user: Annotated[str | None, Meta(description="Before a user message.")] = None
    eoh: Annotated[str | None, Meta(description="After a user message.")] = None
    assistant: Annotated[str | None, Meta(description="Before an assistant message.")] = None
    eoa: Annotated[str | None, Meta(description="After an assistant message.")] = None
    separator: Annotated[str | None, Meta(description="Between two turns.")] = None
    capability: Annotated[
        Capability | None, Meta(description="What the model can do: completion, chat, infilling or python.")
    ] = None
    stop_words: Annotated[list[str] | None, Meta(description="Texts that end an answer.")] = None
    chat_template: Annotated[str | None, Meta(description="A Jinja template to use instead of the checkpoint's.")] = (
        None
    )

    @property
    def names_template(self) -> bool:
        """Whether the fields select a template instead of the checkpoint's."""
        return bool(self.parts) or not (self.model_name is self.model_path is self.chat_template is None)

    @property
    def parts(self) -> dict[str, str]:
        """The set fields that only a composed template has."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}

    def to_json(self, file_path: str | None = None) -> str:
        """Return the set fields as JSON, and write them to `file_path` if given."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        text = msgspec.json.format(msgspec.json.encode(fields)).decode()
        if file_path is not None:
            with open(file_path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    @classmethod
    def from_json(cls, file_or_text: str | os.PathLike[str]) -> ChatTemplateConfig:
        """Read a JSON file, or JSON text. Raises InvalidParameter if it is neither, or has wrong fields."""
        if not isinstance(file_or_text, str | os.PathLike):
            raise InvalidParameter(f"A chat template is a JSON file or JSON text, not {type(file_or_text).__name__}.")
        text = os.fspath(file_or_text)
        if not text.lstrip().startswith("{"):
            try:
                with open(text, encoding="utf-8") as file:
                    text = file.read()
            except (OSError, ValueError) as error:
                raise InvalidParameter(
                    f"Cannot read the chat template file {text!r} ({type(error).__name__}). "
                    f"Give the path of a JSON file, or JSON text that begins with '{{'."
                ) from None
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidParameter(f"The chat template is not a JSON object: {error}.") from None
        return cls.from_dict(fields).checked()
