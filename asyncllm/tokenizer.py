"""The tokenizer as programs open it, by the name of a model."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import msgspec

from asyncllm.locate import BUNDLED, locate
from asyncllm.text import tokenizer

__all__ = ["Encoded", "Tokenizer"]


class Encoded(msgspec.Struct, frozen=True):
    """The token ids of a text, or of each of several texts."""

    input_ids: list[int] | list[list[int]]


class Tokenizer(tokenizer.Tokenizer):
    """The tokenizer of a model, without its weights: `Tokenizer("tiny-chat").encode("Hello")`."""

    def __init__(self, model_path: str | PathLike[str], trust_remote_code: bool = False) -> None:
        """Read the tokenizer's files.

        `model_path`: a folder, the name of a bundled model, or a model id of the hub, of which all files but the
        weights are downloaded. `trust_remote_code` has no effect: no code of a checkpoint is run. Raises ModelNotFound
        and InvalidCheckpoint.
        """
        folder = Path(model_path)
        if model_path in BUNDLED or not folder.is_dir():
            folder = locate(model_path, weights=False)
        opened = self.from_folder(folder)
        super().__init__(opened.model, bos_token_id=opened.bos_token_id, eos_token_ids=opened.eos_token_ids)

    def __call__(self, texts: str | Sequence[str]) -> Encoded:
        """Return the token ids of a text, or of each of several. Raises InvalidMessage."""
        return Encoded(self.encode(texts) if isinstance(texts, str) else self.encode_batch(texts))

    def get_vocab(self) -> dict[str, int]:
        """Return spelling -> id of all tokens."""
        spelled = ((self.model.token(id_), id_) for id_ in range(self.vocab_size))
        return {token: id_ for token, id_ in spelled if token is not None}
