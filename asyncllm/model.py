"""LMDeploy's import path of chat templates, for programs written for it."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from asyncllm.config import ChatTemplateConfig
from asyncllm.locate import locate
from asyncllm.text.chat_template import CHECKPOINT, ChatTemplate
from asyncllm.text.image_marks import IMAGE_PARTS, VIDEO_PARTS, split_marks, take_images
from asyncllm.text.templates import registry
from asyncllm.text.templates.composed import BaseChatTemplate
from asyncllm.types import Message

__all__ = ["MODELS", "BaseChatTemplate", "ChatTemplateConfig", "CheckpointTemplate"]


class CheckpointTemplate:
    """A checkpoint's own chat template, LMDeploy's `MODELS.get("hf")(model_path)`."""

    def __init__(self, model_path: str | PathLike[str], *, trust_remote_code: bool = False) -> None:
        """`model_path`: a folder, the name of a bundled model, or a model id of the hub. `trust_remote_code` has no
        effect: no code of a checkpoint is run. Raises ModelNotFound, and InvalidCheckpoint if it has no template."""
        self._template = ChatTemplate.open(locate(model_path, weights=False), ChatTemplateConfig(model_name=CHECKPOINT))
        self.stop_words = list(self._template.stop_words)

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """Return one user turn and the beginning of the answer. `sequence_start=False`: it follows earlier turns."""
        return self._template.get_prompt(prompt, sequence_start)

    def messages2prompt(self, messages: str | Sequence[Message], sequence_start: bool = True, **variables: Any) -> str:
        """Return the prompt of a conversation. `variables`: the template's, such as tools and enable_thinking. For
        parts that are images or videos, with or without one, it holds what the template writes for them.

        Raises InvalidMessage for malformed messages, InvalidParameter for variables that the template does not read.
        """
        if isinstance(messages, str) and not variables:
            return self.get_prompt(messages, sequence_start)
        if not sequence_start:
            return self._template.messages2prompt(messages, False)
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        marked, _ = take_images([_with_media(message) for message in conversation])
        text = self._template.render(marked, variables=variables)
        return "".join(own + behind for own, behind in split_marks(text))


def _with_media(message: Message) -> Message:
    """Return a message whose parts that stand for an image or a video, and hold none, hold an empty one."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    media = (*IMAGE_PARTS, *VIDEO_PARTS)
    empty = [isinstance(part, dict) and len(part) == 1 and part.get("type") in media for part in content]
    filled = [{**part, part["type"]: ""} if bare else part for part, bare in zip(content, empty, strict=True)]
    return {**message, "content": filled}


class _Models(registry.Registry):
    """The registry as programs see it: with the class that reads a checkpoint's own template."""

    def get(self, name: str) -> type[Any] | None:
        return super().get(name) or (CheckpointTemplate if name == CHECKPOINT else None)


MODELS = _Models(registry.MODELS.users)
