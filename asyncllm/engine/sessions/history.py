"""History: a conversation as token ids and as turns, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncllm.engine.requests.answer import Answer
from asyncllm.errors import InvalidParameter
from asyncllm.prompt_image import PromptImage
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message

__all__ = ["History", "Turn", "TurnInput", "without_stop_word"]


class TurnInput(NamedTuple):
    """The prompt of a turn."""

    prompt: object
    """The user's input."""
    messages: list[Message] | None = None
    """The input as messages, with marks instead of images; None if no chat template wrote the prompt."""
    template: ChatTemplate | None = None
    """The chat template that wrote it, the model's or an adapter's, or None."""


class Turn:
    """One exchange: token positions within the session's history, and the texts they stand for."""

    __slots__ = ("answer", "answer_start", "end", "input")

    def __init__(self, input: TurnInput, answer_start: int, end: int, answer: str) -> None:
        self.input = input
        self.answer_start = answer_start
        self.end = end
        self.answer = answer


class History:
    """The conversation up to some turn. Immutable: another turn makes another History."""

    __slots__ = ("images", "token_ids", "turns")

    def __init__(self, token_ids: list[int], turns: list[Turn], images: Sequence[PromptImage] = ()) -> None:
        self.token_ids = token_ids
        """Prompts, template and answers."""
        self.turns = turns
        self.images = images
        """The images in these tokens, in order."""

    def cut(self, step: int, tokenizer: Tokenizer) -> History:
        """Return the history of the first `step` tokens; there are at least as many. Raises InvalidParameter if `step`
        is within an image."""
        if step == len(self.token_ids):
            return self
        images = [image for image in self.images if image.position < step]
        if images and images[-1].end > step:
            raise InvalidParameter(
                f"step={step} is within an image, whose tokens are {images[-1].position} to {images[-1].end - 1}. Cut "
                f"the session before or after it.",
                "step",
            )
        token_ids, turns, start = self.token_ids[:step], self.turns, 0
        for index, turn in enumerate(self.turns):
            if turn.end > step:
                turns = self.turns[:index]
                if step > start:
                    # A turn cut in the middle keeps the rest of its answer.
                    answer_start = min(turn.answer_start, step)
                    answer = tokenizer.decode(token_ids[answer_start:])
                    turns.append(Turn(turn.input, answer_start, step, answer))
                break
            start = turn.end
        return History(token_ids, turns, images)

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template of the latest turn that was written by one; None if there is no such turn."""
        written = (turn.input.template for turn in reversed(self.turns))
        return next((template for template in written if template is not None), None)

    def messages(self) -> list[Message]:
        """Return the conversation without the last answer."""
        messages: list[Message] = []
        for index, turn in enumerate(self.turns):
            messages.extend(turn.input.messages or [{"role": "user", "content": str(turn.input.prompt)}])
            if index < len(self.turns) - 1:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


def without_stop_word(token_ids: list[int], start: int, answer: Answer, tokenizer: Tokenizer) -> list[int]:
    """Return prompt and answer without the tokens of a stop word that ended the answer. The answer begins at
    `start`."""
    if not isinstance(answer.stop_reason, str):
        return token_ids
    detokenizer, text, end, size = Detokenizer(tokenizer), answer.text, start, 0
    for place, token in enumerate(token_ids[start:], start + 1):
        piece = detokenizer.push([token])
        if not text.startswith(piece, size):
            break
        if piece:
            end, size = place, size + len(piece)
    kept = tokenizer.decode(token_ids[start:end])
    rest = tokenizer.encode(text[len(kept) :], add_bos=False) if len(kept) < len(text) else []
    return token_ids[:end] + rest
