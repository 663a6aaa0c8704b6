"""The placeholder tokens of images in a checkpoint's prompts, read from its tokenizer's files and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import read_json_object

__all__ = ["added_tokens", "fallback_token", "fallback_token_id", "image_token", "token_id_of", "token_of"]


class _Token(msgspec.Struct):
    id: int
    content: str


class _Pipeline(msgspec.Struct):
    """The fields of tokenizer.json that are read."""

    added_tokens: list[_Token] = []


def added_tokens(folder: Path) -> Mapping[Any, Any]:
    """Return text -> id of the tokenizer's added tokens. Raises InvalidCheckpoint."""
    added = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    known: dict[Any, Any] = {each.get("content"): number for number, each in added.items() if isinstance(each, dict)}
    file = folder / "tokenizer.json"
    if not known and file.is_file():
        # Janus' folders, and those that transformers 5 writes, list added tokens in tokenizer.json only.
        try:
            pipeline = msgspec.json.decode(file.read_bytes(), type=_Pipeline)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidCheckpoint(f"{file} is damaged ({error}). Download it again.") from None
        known = {token.content: token.id for token in pipeline.added_tokens}
    return known | read_json_object(folder / "added_tokens.json")


def fallback_token_id(folder: Path) -> int:
    """Return the id of `fallback_token`; 0, the id of <unk> in the tokenizers of Llama, Mistral and Yi, if the folder
    lists none."""
    known = added_tokens(folder)
    return int(known.get(fallback_token(folder), 0))


def fallback_token(folder: Path) -> str:
    """Return the placeholder token for images of a model whose authors' code defines none: <image>, <unk>, or Qwen's
    <|endoftext|>, whichever the tokenizer has first."""
    known = added_tokens(folder)
    return next((text for text in ("<image>", "<unk>", "<|endoftext|>") if text in known), "<unk>")


def token_of(folder: Path, text: str) -> int:
    """Return the id of an added token. Raises InvalidCheckpoint if the tokenizer lacks it."""
    known = added_tokens(folder)
    if text not in known:
        raise InvalidCheckpoint(
            f"{folder}: the tokenizer has no token {text!r}, the placeholder for images. Download it."
        )
    return int(known[text])


def image_token(fields: Mapping[str, Any], default: int) -> int:
    """Return the id of the placeholder for images from the fields of config.json. Raises InvalidCheckpoint."""
    key = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return token_id_of(fields, key, default)


def token_id_of(fields: Mapping[str, Any], key: str, default: int) -> int:
    """Return the token id in an entry of config.json. Raises InvalidCheckpoint."""
    value = fields.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidCheckpoint(f"config.json: {key} = {value!r} is not a token id. Correct the file.")
    return int(value)
