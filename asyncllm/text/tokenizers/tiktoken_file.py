"""Files of tiktoken: the vocabulary of a byte-level BPE. Each line is a token in base64 and its merge rank, which is
its id."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import MAX_TOKEN_ID

__all__ = ["GLM", "HUNYUAN", "KIMI", "QWEN", "find_tiktoken_file", "read_ranks"]

QWEN, HUNYUAN, KIMI, GLM = "qwen.tiktoken", "hy.tiktoken", "tiktoken.model", "tokenizer.model"
"""Names of the files of Qwen's first generation, Hunyuan-A13B, Kimi-K2 and Moonlight, and GLM-4-9B."""


def find_tiktoken_file(folder: Path) -> Path | None:
    """Return the tiktoken file of a checkpoint, or None. A tokenizer.model may be tiktoken's or sentencepiece's."""
    for name in (QWEN, HUNYUAN, KIMI, GLM):
        path = folder / name
        if path.is_file() and (name != GLM or _holds_ranks(path)):
            return path
    return None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return tokens and their ranks, which count from 0. Raises InvalidCheckpoint."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise InvalidCheckpoint(
            f"{path} is not a list of tokens in base64 with their ranks: {error}. The file is truncated or damaged (a "
            f"Git LFS pointer, perhaps); download it again."
        ) from None
    if not ranks or b"" in ranks or len(ranks) > MAX_TOKEN_ID or set(ranks.values()) != set(range(len(ranks))):
        raise InvalidCheckpoint(
            f"{path}: the ranks of its {len(ranks)} tokens do not count up from 0. The file is damaged; download it "
            f"again."
        )
    return ranks


def _holds_ranks(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(4096)
    return len(line.split()) == 2 and line.split()[1].isdigit() and line.isascii()
