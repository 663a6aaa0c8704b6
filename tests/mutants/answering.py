"""Faults in what stands between a user's words and tokens: admission, sessions, text."""

from __future__ import annotations

from tests.mutants.mutant import mutants

__all__ = ["ANSWERING"]

SESSION = mutants(
    "engine/session.py",
    ("            if not self._delivery.abandoned:", "            if False:", "a second turn waits for the first"),
    (
        "        except BaseException:\n            self.token_ids, self.turns = self._before",
        "        except BaseException:\n            pass",
        "a refused turn leaves the history cut",
    ),
    ("        if self._stop_asked:", "        if False:", "a turn is not stopped while its prompt is being encoded"),
    ("            if step:\n                self.rewind(step)\n", "", "step is ignored"),
    (
        "history_len = min(self.step, len(token_ids))",
        "history_len = 0",
        "the history counts as tokens of the new prompt",
    ),
    ("        if config.n != 1:", "        if False:", "a turn of several answers loses all but one"),
    (
        "if history and history[-1] in self._host.tokenizer.eos_token_ids:",
        "if False:",
        "the end of a turn is in the history twice",
    ),
    (
        "        if request is None or self.closed:",
        "        if request is None:",
        "a closed session pins blocks again",
    ),
    ("        if sequence.finish_reason is None:", "        if False:", "a turn that never ran becomes history"),
    (
        "        self._pinned = self._host.pin(self._pinned, self.token_ids, self._cache_salt)",
        "        pass",
        "the blocks of a turn are not pinned",
    ),
    ("        if not stopped_by_text:", "        if True:", "a stop word's tokens stay in the history"),
    ("            if turn.end > step:", "            if turn.end >= step:", "rewinding to the end of a turn cuts it"),
    ("                if step > start:", "                if True:", "rewinding leaves a turn without tokens"),
    (
        "            self.stop()\n            self.closed = True",
        "            self.closed = True",
        "a running turn goes on when its session closes",
    ),
    ("            self._host.forget(self)", "            pass", "closed sessions stay in the table"),
) + mutants(
    "engine/sessions.py",
    ("        cache.unpin(old)", "        pass", "the pins of earlier turns are never taken back"),
    (
        "extend_hashes(new, root_hash(cache_salt=cache_salt), token_ids, self._block_size)",
        "extend_hashes(new, root_hash(), token_ids, self._block_size)",
        "a salted conversation pins blocks of nobody",
    ),
)

DETOKENIZER = mutants(
    "text/detokenizer.py",
    (
        "if self._settled and len(ids) == 1",
        "if self._texts and len(ids) == 1",
        "tokens are read alone although a character is incomplete",
    ),
    (
        'utf_8_decode(data, "replace", False)',
        'utf_8_decode(data, "replace", True)',
        "an incomplete character becomes U+FFFD",
    ),
    ("        self._pending = data[used:]", '        self._pending = b""', "incomplete characters are lost"),
    (
        "        self._settled = not self._pending and not self._at_start",
        "        self._settled = True",
        "what is held back is forgotten by the next token",
    ),
    (
        'self._window.flush() + self._pending.decode("utf-8", "replace")',
        "self._window.flush()",
        "an incomplete character at the end is lost",
    ),
    (
        "if not text.endswith(REPLACEMENT) or len(self._fresh) >= WINDOW:",
        "if not text.endswith(REPLACEMENT):",
        "undecodable ids are held back without bound",
    ),
    (
        "self._context = (self._context + self._fresh)[-WINDOW:]",
        "self._context = (self._context + self._fresh)[:WINDOW]",
        "tokens are decoded behind the wrong neighbours",
    ),
    ("        if self._matched is not None:", "        if False:", "text goes on behind a stop word"),
    (
        "end, start, self._matched = min(found)",
        "end, start, self._matched = found[0]",
        "the stop word that was named first wins, not the one that came first",
    ),
    (
        "text[: end if self._include else start]",
        "text[:start]",
        "include_stop_str_in_output is ignored",
    ),
    (
        "range(max(0, len(text) - self._longest + 1), len(text))",
        "range(max(0, len(text) - self._longest + 2), len(text))",
        "the beginning of a stop word gets out",
    ),
    ("        text = self._held + text\n", "", "stop words across pieces are missed"),
    ('        text, self._held = self._held, ""', '        text, self._held = "", ""', "the end of an answer is lost"),
)

ADMISSION = mutants(
    "engine/admission.py",
    (
        "        if field is not None and not renders:",
        "        if False:",
        "fields of the chat template are accepted and ignored",
    ),
    ("        if size <= INLINE_SIZE:", "        if True:", "long prompts are encoded on the event loop"),
    (
        "if type(token) is not int or not 0 <= token < self._vocab_size:",
        "if type(token) is not int or not 0 <= token <= self._vocab_size:",
        "the first id behind the vocabulary reaches the model",
    ),
    ("        if highest >= self._vocab_size:", "        if False:", "a tokenizer's surplus ids reach the model"),
    (
        "min(config.max_new_tokens or room, room)",
        "(config.max_new_tokens or room)",
        "answers are longer than there is room for",
    ),
    (
        "temperature=config.temperature if config.temperature >= GREEDY_BELOW else 0.0,",
        "temperature=config.temperature,",
        "tiny temperatures overflow",
    ),
    ("seed=(seed + index) % 2**64,", "seed=seed,", "all answers to a prompt are the same"),
    (
        "stop_token_ids=tuple(sorted(stop_ids)) if config.min_new_tokens else (),",
        "stop_token_ids=(),",
        "stop tokens are sampled before min_new_tokens",
    ),
    (
        "hidden_ids=frozenset() if config.include_stop_str_in_output else stop_ids,",
        "hidden_ids=stop_ids,",
        "stop tokens are left out although they were asked for",
    ),
    (
        "            if limit - prompt_len < needed:",
        "            if limit - prompt_len <= needed:",
        "a prompt that just fits is refused",
    ),
    (
        "return min(self.session_len, self._pool_tokens) - prompt_len",
        "return self.session_len - prompt_len",
        "answers grow beyond the KV cache",
    ),
    ("        if not config.ignore_eos:", "        if True:", "ignore_eos is ignored"),
    ('for spelling in (word, " " + word):', "for spelling in (word,):", "bad words come after a space"),
) + mutants(
    "engine/queue_bounds.py",
    (
        "requests + 1 - self._max_requests if",
        "requests - self._max_requests if",
        "the queue takes one request too many",
    ),
    (
        "        if not requests:\n            return\n",
        "",
        "a prompt longer than max_queued_tokens is refused for ever",
    ),
    (
        "return min(max(ends * seconds_per_end, MIN_RETRY_S), MAX_RETRY_S)",
        "return max(ends * seconds_per_end, MIN_RETRY_S)",
        "clients are told to wait longer than they can be told",
    ),
)

ANSWERING = SESSION + DETOKENIZER + ADMISSION
