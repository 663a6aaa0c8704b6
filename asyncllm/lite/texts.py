"""Calibration texts, as token sequences."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from asyncllm.errors import AsyncLLMError, InvalidParameter, short
from asyncllm.lite.hub_texts import HUB_DATASETS, read_hub_texts
from asyncllm.locate import ASSETS
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Texts", "read_texts", "sequences"]

logger = logging.getLogger("asyncllm")

BUNDLED = ASSETS / "calibration.jsonl"

FEW_TOKENS = 32_000
"""Warn below this number of calibration tokens."""

Text = str | Sequence[dict[str, Any]] | Sequence[int]
"""A text, the messages of a conversation, or token ids."""
Texts = Sequence[Text]


def read_texts(source: str | Path | None) -> list[Text]:
    """Return the texts of a file, the bundled texts for None, or those of one of `HUB_DATASETS`.

    A .txt file separates its texts by empty lines. A line of a .jsonl file is a text, or an object with "text" or
    "messages". An existing file takes precedence over a data set with its name. Raises InvalidParameter for anything
    else, and if the hub cannot be reached.
    """
    if source is not None and not Path(source).is_file():
        if str(source) in HUB_DATASETS:
            return list(read_hub_texts(str(source)))
        raise InvalidParameter(
            f"calib_dataset: {short(str(source))} is not a file. Give a .txt file with empty lines between texts, a "
            f'.jsonl file with {{"text": ...}} or {{"messages": [...]}} in each line, or the name of a data set of the '
            f"hub ({', '.join(HUB_DATASETS)}), or leave it out for the bundled texts.",
            "calib_dataset",
        )
    file = BUNDLED if source is None else Path(source)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"calib_dataset: {file} cannot be read ({error}).", "calib_dataset") from error
    if file.suffix == ".txt":
        return [text for each in re.split(r"\n\s*\n", content) if (text := each.strip())]
    if file.suffix == ".jsonl":
        return list(_lines(content, file))
    raise InvalidParameter(f"calib_dataset: {file} is neither .txt nor .jsonl. Save it as one.", "calib_dataset")


def _lines(content: str, file: Path) -> Iterator[Text]:
    """Yield the texts or conversations of a JSON-lines file. Raises InvalidParameter for other lines."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        found = value.get("messages", value.get("text")) if isinstance(value, dict) else value
        if not isinstance(found, str | list):
            raise InvalidParameter(
                f'calib_dataset: line {number} of {file} is neither a text nor an object with "text" or "messages".',
                "calib_dataset",
            )
        yield found


def sequences(folder: Path, texts: Texts, *, samples: int, length: int) -> list[list[int]]:
    """Return the texts as token ids in a fixed random order, up to samples * length tokens. Texts longer than `length`
    are split.

    Conversations are rendered with the checkpoint's template. Raises InvalidParameter for texts that cannot be read,
    for ids outside the vocabulary, and if no text has any tokens.
    """
    encoder = _Encoder(folder)
    found: list[list[int]] = []
    left = samples * length
    for number in Random(0).sample(range(len(texts)), len(texts)):
        for piece in _pieces(encoder.encode(texts[number], number), length):
            if len(piece) > 1 and left > 0:
                found.append(piece[:left])
                left -= len(piece)
    total = sum(map(len, found))
    if not found:
        raise InvalidParameter(
            f"calib_dataset: no text has two tokens. Give texts of {FEW_TOKENS} tokens or more together, or "
            f"calib_samples=0 to round by the weights alone.",
            "calib_dataset",
        )
    if total < FEW_TOKENS:
        logger.warning("The texts have %d tokens. Fewer than %d may do more harm than good.", total, FEW_TOKENS)
    return found


class _Encoder:
    """The tokenizer and the chat template of a checkpoint. The template is loaded for the first conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.from_folder(folder)
        self._template: ChatTemplate | None = None

    def encode(self, text: Text, number: int) -> list[int]:
        """Return the token ids of text `number`, counted from 0. Raises InvalidParameter, which names the text."""
        try:
            return self._ids(text)
        except AsyncLLMError as error:
            raise InvalidParameter(
                f"calib_dataset: text {number + 1} cannot be used. {error}", "calib_dataset"
            ) from error

    def _ids(self, text: Text) -> list[int]:
        if isinstance(text, str):
            return self._tokenizer.encode(text)
        ids = [each for each in text if isinstance(each, int)]
        if ids and len(ids) == len(text):
            if min(ids) < 0 or max(ids) >= self._tokenizer.vocab_size:
                raise InvalidParameter(f"ids are not all from 0 to {self._tokenizer.vocab_size - 1}.", "calib_dataset")
            return ids
        if self._template is None:
            self._template = ChatTemplate.open(self._folder)
        messages: Any = text
        return self._tokenizer.encode(self._template.render(messages, add_generation_prompt=False), add_bos=False)


def _pieces(ids: list[int], length: int) -> Iterable[list[int]]:
    return (ids[start : start + length] for start in range(0, len(ids), length))
