"""The tokens that stand for images in a checkpoint's prompts, by its tokenizer's files and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import read_json_object

__all__ = ["added_tokens", "image_token", "stand_in", "standing", "token_id_of", "token_of"]


class _Token(msgspec.Struct):
    id: int
    content: str


class _Pipeline(msgspec.Struct):
    """What is read of a tokenizer.json."""

    added_tokens: list[_Token] = []


def added_tokens(folder: Path) -> Mapping[Any, Any]:
    """Return the ids of the tokenizer's added tokens by their texts. Raises InvalidCheckpoint."""
    added = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    known: dict[Any, Any] = {each.get("content"): number for number, each in added.items() if isinstance(each, dict)}
    file = folder / "tokenizer.json"
    if not known and file.is_file():
        # As in the folders of Janus, and in those that transformers 5 writes.
        try:
            pipeline = msgspec.json.decode(file.read_bytes(), type=_Pipeline)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidCheckpoint(f"{file} is damaged ({error}). Download it again.") from None
        known = {token.content: token.id for token in pipeline.added_tokens}
    return known | read_json_object(folder / "added_tokens.json")


def stand_in(folder: Path) -> int:
    """Return the id that stands for images where the authors' code has none: that of <image>, of <unk>, which is 0 in
    the tokenizers of Llama, Mistral and Yi, or of Qwen's <|endoftext|>."""
    known = added_tokens(folder)
    return int(known.get(standing(folder), 0))


def standing(folder: Path) -> str:
    """Return the text of `stand_in`."""
    known = added_tokens(folder)
    return next((text for text in ("<image>", "<unk>", "<|endoftext|>") if text in known), "<unk>")


def token_of(folder: Path, text: str) -> int:
    """Return the id of an added token of the tokenizer. Raises InvalidCheckpoint."""
    known = added_tokens(folder)
    if text not in known:
        raise InvalidCheckpoint(f"{folder}: the tokenizer has no token {text!r}, which stands for images. Download it.")
    return int(known[text])


def image_token(fields: Mapping[str, Any], default: int) -> int:
    key = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return token_id_of(fields, key, default)


def token_id_of(fields: Mapping[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidCheckpoint(f"config.json: {key} = {value!r} is no token id. Correct the file.")
    return int(value)
