"""The `tokenizers` pipeline of a tiktoken file. The file lacks the word pattern and the special tokens, which only the
code of the model's authors defines; the file's name tells which model it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.text.checkpoint_files import MAX_TOKEN_ID, AddedToken, TokenSettings
from asyncllm.text.tokenizers.byte_pairs import byte_pair_pipeline
from asyncllm.text.tokenizers.tiktoken_file import GLM, HUNYUAN, KIMI, QWEN, read_ranks

__all__ = ["tiktoken_pipeline", "words_of"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def words_of(digits: str) -> str:
    """Return the pattern of a word, of Qwen's and most others' tokenizers, given that of a number."""
    return rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{digits}|{_AFTER_WORDS}"


class _Kind(NamedTuple):
    """The parts of a tokenizer that only its authors' code defines."""

    words: str
    """The pattern of a word; words are encoded one by one."""
    special: tuple[str, ...] = ()
    """Tokens after the ranks, for folders whose tokenizer_config.json does not name them."""
    reserved: int = 0
    """Total number of these tokens; the others are named `<|reserved_token_ID|>`."""
    prefix: tuple[str, ...] = ()
    """Tokens that begin every text."""
    composed: bool = False
    """Whether texts are first normalized to Unicode NFC."""


_EXTRAS = tuple(f"<|extra_{index}|>" for index in range(205))

_KINDS: Mapping[str, _Kind] = {
    QWEN: _Kind(words_of(r"\p{N}"), special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS), composed=True),
    HUNYUAN: _Kind(
        words_of(r"\p{N}"),
        special=("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS),
        prefix=("<|startoftext|>",),
        composed=True,
    ),
    KIMI: _Kind(
        rf"[\p{{Han}}]+|{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_AFTER_WORDS}",
        reserved=256,
    ),
    GLM: _Kind(words_of(r"\p{N}{1,3}"), prefix=("[gMASK]", "<sop>")),
}
"""Name of the file -> kind."""

_TOKENS_OF_IMAGES = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>")
"""Tokens of Qwen-VL, after the other special ones."""


def tiktoken_pipeline(path: Path, settings: TokenSettings) -> HubTokenizer:
    """Return the pipeline of a tiktoken file with the checkpoint's special tokens. Raises InvalidCheckpoint."""
    kind, ranks = _KINDS[path.name], read_ranks(path)
    named = _special_tokens(len(ranks), kind, settings)
    return byte_pair_pipeline(path, ranks, kind.words, named, prefix=kind.prefix, composed=kind.composed)


def _special_tokens(first: int, kind: _Kind, settings: TokenSettings) -> dict[int, AddedToken]:
    """Return the tokens after the ranks, by id: from the checkpoint's files, or else from the authors' code."""
    names = kind.special
    if kind.special and settings.model.get("visual") is not None:
        names += _TOKENS_OF_IMAGES
    tokens = {first + index: AddedToken(name) for index, name in enumerate(names)}
    tokens |= {id_: token for id_, token in settings.added.items() if id_ >= first}
    last = max((*tokens, first + kind.reserved - 1))
    if last - first > MAX_TOKEN_ID // 16:
        raise InvalidCheckpoint(
            f"tokenizer_config.json gives {short(tokens[last].content)} the id {last}, and the vocabulary ends at "
            f"{first - 1}. The file is damaged; download it again."
        )
    return {id_: tokens.get(id_, AddedToken(f"<|reserved_token_{id_}|>")) for id_ in range(first, last + 1)}
