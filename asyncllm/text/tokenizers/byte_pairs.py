"""The `tokenizers` pipeline equivalent to tiktoken for a table of tokens and ranks.

tiktoken first joins the neighbours whose union has the lowest rank. Every way to split a token into two others is
therefore a merge, in order of rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken as HubAddedToken
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import AddedToken
from asyncllm.text.tokenizers.token_table import byte_level_text

__all__ = ["added_token", "byte_pair_pipeline"]


def byte_pair_pipeline(
    path: Path,
    ranks: Mapping[bytes, int],
    words: str,
    named: Mapping[int, AddedToken],
    *,
    first: int = 0,
    prefix: tuple[str, ...] = (),
    composed: bool = False,
) -> HubTokenizer:
    """Return the pipeline of the tokens in `path`, whose ids are their ranks plus `first`.

    `words`: the pattern of a word; words are encoded one by one. `named`: additional tokens by id, before or after the
    others. `prefix`: tokens that begin every text. `composed`: texts are normalized to Unicode NFC. Raises
    InvalidCheckpoint for a name that occurs twice.
    """
    texts = {token: byte_level_text(token) for token in ranks}
    ranked = sorted(ranks, key=ranks.__getitem__)
    merges = [(texts[left], texts[right]) for token in ranked for left, right in _splits(token, ranks)]
    vocabulary = {text: first + ranks[token] for token, text in texts.items()}
    vocabulary |= {token.content: id_ for id_, token in named.items() if id_ < first}
    # A word that is itself a token becomes that token, however its parts would be joined.
    tokenizer = HubTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([added_token(token) for _, token in sorted(named.items())])
    if len(vocabulary) < first + len(ranks) or any(
        tokenizer.token_to_id(each.content) != id_ for id_, each in named.items()
    ):
        raise InvalidCheckpoint(
            f"{path}: a special token is named twice, or is a token of the vocabulary already. The files are of "
            f"different models; download them again."
        )
    ids = {token: tokenizer.token_to_id(token) for token in prefix}
    if ids and None not in ids.values():
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join((*prefix, "$A")), special_tokens=list(ids.items())
        )
    return tokenizer


def added_token(token: AddedToken) -> HubAddedToken:
    """Return the library's form of a token."""
    return HubAddedToken(
        token.content,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=False,
    )


def _splits(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for split in range(1, len(token)):
        left, right = token[:split], token[split:]
        if left in ranks and right in ranks:
            yield left, right
