"""WordEncoder turns the stop words and bad words of a config into token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncllm.config import GenerationConfig
from asyncllm.engine.requests.prompt_encoder import PromptEncoder
from asyncllm.errors import InvalidParameter
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import StopWords

__all__ = ["WordEncoder", "Words"]

WORD_SIZE = 256
"""Fixed cost of encoding a bad word, in characters of text."""

KNOWN_WORDS = 16
"""Maximum number of configs whose encoded words are kept for later requests."""

MAX_STOP_CHARACTERS = 2**19
"""Maximum characters of a request's stop words, times its number of answers."""


class Words(NamedTuple):
    """The stop words and bad words of a config, encoded."""

    stop_ids: frozenset[int]
    """Tokens that end the answer."""
    stop_words: StopWords
    """Texts that end the answer."""
    bad_words: tuple[tuple[int, ...], ...]
    """Token sequences that are never completed."""


class WordEncoder:
    """Encodes words with the model's tokenizer. Used in the event loop's thread."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._known: OrderedDict[tuple[Any, ...], Words] = OrderedDict()
        """Words of recent configs. The prompts of a batch share them."""

    async def of(self, config: GenerationConfig, template: ChatTemplate) -> Words:
        """Return the words of a config and a chat template, encoded in a thread if they are many. Raises
        InvalidRequest."""
        lists = (config.stop_words, config.stop_token_ids, config.bad_words, config.bad_token_ids)
        added = template.stop_words
        key = (added, config.n, config.ignore_eos, config.is_constrained, *(tuple(each or ()) for each in lists))
        words = self._known.get(key)
        if words is None:
            bad = config.bad_words or ()
            size = WORD_SIZE * len(bad) + sum(map(len, bad))
            words = self._known[key] = await self._encoder.offload(lambda: self._make(config, added), size)
            if len(self._known) > KNOWN_WORDS:
                self._known.popitem(last=False)
        return words

    def _make(self, config: GenerationConfig, added: Sequence[str]) -> Words:
        """Return the config's words; `added`: the stop words of the chat template."""
        stop_words = list(dict.fromkeys([*(config.stop_words or ()), *added]))
        characters = sum(map(len, stop_words))
        if characters * config.n > MAX_STOP_CHARACTERS:
            raise InvalidParameter(
                f"stop_words have {characters} characters, which are looked for in each of n={config.n} answers: that "
                f"is more than {MAX_STOP_CHARACTERS} in a request. Give fewer or shorter ones, or ask for fewer "
                f"answers.",
                "stop_words",
            )
        stop_ids, text_stops = self._stops(config, stop_words)
        return Words(stop_ids, StopWords(text_stops), self._bad_words(config))

    def _stops(self, config: GenerationConfig, stop_words: list[str]) -> tuple[frozenset[int], list[str]]:
        """Return the token ids that end the answer, and the stop words to look for in its text."""
        stop_ids = set(self._encoder.check_token_ids(config.stop_token_ids or (), "stop_token_ids"))
        # The end of a constrained answer always counts as a stop.
        ignores_end = config.ignore_eos and not config.is_constrained
        if not ignores_end:
            stop_ids.update(self._encoder.tokenizer.eos_token_ids)
        own_words = set(config.stop_words or ())
        text_stops = []
        for word in stop_words:
            special = self._special(word)
            if special is not None:
                # A special token never appears in the text, so its id is looked for.
                if word in own_words or not ignores_end:
                    stop_ids.add(special)
            elif word in own_words or not ignores_end:
                text_stops.append(word)
        return frozenset(stop_ids), text_stops

    def _special(self, word: str) -> int | None:
        """Return the id of a word that is a special token, else None."""
        tokenizer = self._encoder.tokenizer
        token = tokenizer.token_id(word)
        return token if token in tokenizer.special_token_ids else None

    def _bad_words(self, config: GenerationConfig) -> tuple[tuple[int, ...], ...]:
        """Return each bad word as token sequences: at the start of a text and after a space."""
        bad_ids = self._encoder.check_token_ids(config.bad_token_ids or (), "bad_token_ids")
        banned: set[tuple[int, ...]] = {(token,) for token in bad_ids}
        spellings: list[str] = []
        for word in config.bad_words or ():
            special = self._special(word)
            if special is not None:
                banned.add((special,))
                continue
            spellings += (word, " " + word)
        encode = self._encoder.tokenizer.encode_batch
        for ids in encode(spellings, add_bos=False, parse_special=False) if spellings else ():
            if ids:
                banned.add(tuple(ids))
        return tuple(sorted(banned))
