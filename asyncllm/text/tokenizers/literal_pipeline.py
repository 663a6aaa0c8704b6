"""A `tokenizers` pipeline that recognizes special tokens at given positions only."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from tokenizers import AddedToken as HubAddedToken
from tokenizers import Tokenizer as HubTokenizer

from asyncllm.text.tokenizers.added_tokens import SPACE, FoundToken

__all__ = ["LiteralPipeline"]


class LiteralPipeline:
    """A pipeline with the model of another one, and its added tokens except the special ones.

    Each special token is replaced by a stand-in, a token with the same properties that no text can spell. The text
    around it is thus normalized, split and encoded as around the token itself.
    """

    def __init__(
        self,
        original: HubTokenizer,
        special: Mapping[int, HubAddedToken],
        spelled: Mapping[str, int],
        inside: frozenset[int],
    ) -> None:
        """`special`: added tokens by id. `spelled`: all texts that name a special token. `inside`: ids of the tokens
        that include a leading space, as if both were text."""
        self._pipeline = HubTokenizer(original.model)
        if original.normalizer is not None:
            self._pipeline.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            self._pipeline.pre_tokenizer = original.pre_tokenizer
        self._fill_gaps()
        self._ids: dict[int, int] = {}
        """Ids of this pipeline -> those of the original, for added tokens."""
        for id_, token in sorted(original.get_added_tokens_decoder().items()):
            if id_ not in special:
                self._ids[self._add(_like(token, token.content, normalized=token.normalized))] = id_
        self._prepends = original.normalizer is not None and original.normalizer.normalize_str("x") == f"{SPACE}x"
        self._spelled = spelled
        self._inside = inside
        self._stand_ins: dict[int, str] = {}
        """Special id -> its stand-in. In a pipeline that prepends, tokens inside a text are found after the prepended
        text."""
        self._plain_stand_ins: dict[int, str] = {}
        """The same, for tokens that are found before the text is normalized."""
        self._stand_in_ids: set[int] = set()
        for id_, token in special.items():
            late = self._prepends if id_ in inside else token.normalized
            self._plain_stand_ins[id_] = self._stand_in(token, normalized=False)
            self._stand_ins[id_] = self._stand_in(token, normalized=True) if late else self._plain_stand_ins[id_]
        self._break = _unguessable()
        self._break_id = self._add(HubAddedToken(self._break, special=False, normalized=False))

    def encode(self, text: str, tokens: Sequence[FoundToken], literal: Sequence[tuple[int, int]]) -> list[int]:
        """Return the token ids of a text. `tokens`: its special tokens, in order. `literal`: (start, end) pairs, in
        order, in which nothing is a special token."""
        ids, of_text = self._encode(text, tokens, (), self._stand_ins)
        if not of_text.isdisjoint(self._spelled.get(text[start:end]) for start, end in literal):
            # Unigram knows special tokens as pieces of text, so these are broken after their first characters.
            breaks = [start + 1 for start, end in literal if end > start + 1]
            ids, _ = self._encode(text, tokens, breaks, self._stand_ins)
        return ids

    def _encode(
        self, text: str, tokens: Sequence[FoundToken], breaks: Sequence[int], stand_ins: Mapping[int, str]
    ) -> tuple[list[int], set[int]]:
        """Return token ids, and which of them came from plain text."""
        marked = "".join(self._marked(text, tokens, breaks, stand_ins))
        waiting = iter(tokens)
        ids: list[int] = []
        of_text: set[int] = set()
        for id_ in self._pipeline.encode_batch_fast([marked], add_special_tokens=False)[0].ids:
            if id_ in self._stand_in_ids:
                ids.append(next(waiting).id)
            elif id_ != self._break_id:
                ids.append(self._ids.get(id_, id_))
                of_text.add(ids[-1])
        if next(waiting, None) is not None:
            # Normalizing the text before a stand-in can hide it, where the token itself would be found.
            return self._encode(text, tokens, breaks, self._plain_stand_ins)
        return ids, of_text

    def _marked(
        self, text: str, tokens: Sequence[FoundToken], breaks: Sequence[int], stand_ins: Mapping[int, str]
    ) -> Iterator[str]:
        """Yield the text with stand-ins and breaks."""
        marks = sorted([*tokens, *(FoundToken(at, at, -1) for at in breaks)])
        last = 0
        begins = True
        """Whether the pipeline prepends here."""
        for start, end, id_ in marks:
            yield text[last:start]
            begins = begins and start == last
            if id_ < 0:
                yield self._break
            else:
                # A token spelled as in the vocabulary stands for itself.
                led = id_ in self._inside and not text.startswith(SPACE, start)
                if led and self._prepends and not begins:
                    yield " "
                stand_in = self._plain_stand_ins[id_] if id_ in self._inside and not led else stand_ins[id_]
                yield stand_in
            begins = id_ < 0 or stand_in == self._plain_stand_ins[id_]
            last = end
        yield text[last:]

    def _stand_in(self, token: HubAddedToken, *, normalized: bool) -> str:
        content = _unguessable()
        self._stand_in_ids.add(self._add(_like(token, content, normalized=normalized, single_word=False)))
        return content

    def _add(self, token: HubAddedToken) -> int:
        self._pipeline.add_tokens([token])
        id_ = self._pipeline.token_to_id(token.content)
        assert id_ is not None
        return id_

    def _fill_gaps(self) -> None:
        """Number new tokens from the vocabulary's size on; a vocabulary with gaps may still have ids there."""
        vocabulary = self._pipeline.get_vocab(with_added_tokens=False)
        missing = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        if missing:
            self._pipeline.add_tokens([_unguessable() for _ in range(missing)])


def _like(token: HubAddedToken, content: str, *, normalized: bool, single_word: bool | None = None) -> HubAddedToken:
    return HubAddedToken(
        content,
        single_word=token.single_word if single_word is None else single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=normalized,
        special=False,
    )


def _unguessable() -> str:
    """Return a text that no normalizer changes and no client can write."""
    return secrets.token_hex(16)
