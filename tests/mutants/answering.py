"""Faults in what stands between a user's words and tokens: what prepares requests, sessions, text."""

from __future__ import annotations

from tests.mutants.mutant import mutants

__all__ = ["ANSWERING"]

SESSION = mutants(
    "engine/sessions/session_table.py",
    ("            if not self._delivery.abandoned:", "            if False:", "a second turn waits for the first"),
    ("        if self.closed:\n            return\n", "", "a closed session pins blocks again"),
    (
        "        if request is None or request.sequences[0].finish_reason is None:",
        "        if request is None:",
        "a turn that never ran becomes history",
    ),
    (
        "        self._pinned = self._table.pin(self._pinned, self.past, self._root)",
        "        pass",
        "the blocks of a turn are not pinned",
    ),
    ("[*self._goes_on_from.turns, turn]", "[*self.past.turns, turn]", "the turns behind step stay in the history"),
    ("        if self._closes:", "        if False:", "sequence_end=True keeps the session"),
    (
        "            self.stop()\n            self.closed = True",
        "            self.closed = True",
        "a running turn goes on when its session closes",
    ),
    ("            self._table.forget(self)", "            pass", "closed sessions stay in the table"),
    ("        cache.unpin(old)", "        pass", "the pins of earlier turns are never taken back"),
    (
        "self._loop.scheduler.sharing.keys_for_longer(past.token_ids, root, past.images)",
        "self._loop.scheduler.sharing.keys_for_longer(past.token_ids, type(root)(), past.images)",
        "a salted conversation pins blocks of nobody",
    ),
) + mutants(
    "engine/sessions/history.py",
    ("        if step == len(self.token_ids):\n            return self\n", "        return self\n", "step is ignored"),
    ("    if not isinstance(answer.stop_reason, str):", "    if True:", "a stop word's tokens stay in the history"),
    ("            if turn.end > step:", "            if turn.end >= step:", "cutting at the end of a turn cuts it"),
    ("                if step > start:", "                if True:", "cutting leaves a turn without tokens"),
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
    ('            return "", self._matched', "            return text, None", "text goes on behind a stop word"),
    (
        "if self._matched is None or (place, begin) < (end, start):",
        "if self._matched is None:",
        "the stop word that was named first wins, not the one that came first",
    ),
    ("len(held) + end if self._include else start", "start", "include_stop_str_in_output is ignored"),
    (
        "max(self._open.values(), default=0)], None",
        "0 * len(self._open)], None",
        "the beginning of a stop word gets out",
    ),
    ("word.match(text, before.get(index, 0), end)", "word.match(text, 0, end)", "stop words across pieces are missed"),
    ("text, self._open = self._held(), {}", 'text, self._open = "", {}', "the end of an answer is lost"),
    ("same = word[place] == word[border]", "same = True", "a stop word behind half of itself is missed"),
)

PREPARE = (
    mutants(
        "engine/requests/input_processor.py",
        (
            "past = conversation.cut(call.step) if call.step else conversation.past",
            "past = conversation.past",
            "a turn ignores its step",
        ),
        (
            "known = min(len(past.token_ids), len(prompt_ids))",
            "known = 0",
            "the history counts as tokens of the new prompt",
        ),
        ("        if valid.config.n != 1:", "        if False:", "a turn of several answers loses all but one"),
        (
            "closes = call.conversation is None and call.sequence_end",
            "closes = call.sequence_end",
            "a session that chat was given ends with its first turn",
        ),
        ("        if call.step and not call.is_turn:", "        if False:", "step without a session is ignored"),
        (
            "adapter = None if call.adapter_name is None else self._adapters.find(call.adapter_name)",
            "adapter = None",
            "adapter_name is ignored",
        ),
        (
            "return past.token_ids + await self._encoder.given_ids(call.input_ids, name)",
            "return await self._encoder.given_ids(call.input_ids, name)",
            "token ids as a turn forget the conversation",
        ),
        (
            "owner=(valid.policy.user, valid.policy.cache_salt),",
            "owner=0,",
            "who brings many long texts keeps all others waiting",
        ),
        ('whole=call.purpose == "embedding",', "whole=False,", "texts are embedded without the end of a text"),
        ("        if highest >= encoder.vocab_size:", "        if False:", "a tokenizer's surplus ids reach the model"),
        (
            "room = encoder.room(len(prompt_ids), 1 if answered else 0)",
            "room = encoder.room(len(prompt_ids), 1)",
            "a scored prompt that just fits is refused",
        ),
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
            "stop_token_ids=tuple(sorted(words.stop_ids)) if config.min_new_tokens else (),",
            "stop_token_ids=(),",
            "stop tokens are sampled before min_new_tokens",
        ),
    )
    + mutants(
        "engine/requests/split_answer.py",
        (
            "hidden_ids=frozenset() if config.include_stop_str_in_output else stop_ids,",
            "hidden_ids=stop_ids,",
            "stop tokens are left out although they were asked for",
        ),
    )
    + mutants(
        "engine/requests/words.py",
        (
            "key = (added, config.n, config.ignore_eos, config.is_constrained, *(",
            "key = (added, config.n, None, config.is_constrained, *(",
            "an answer that is to ignore the end of text ends by the words of one before",
        ),
        ("        if not ignores_end:", "        if True:", "ignore_eos is ignored"),
        ('spellings += (word, " " + word)', "spellings += (word,)", "bad words come after a space"),
    )
    + mutants(
        "engine/requests/prompt_encoder.py",
        (
            "        if field is not None and not renders:",
            "        if False:",
            "fields of the chat template are accepted and ignored",
        ),
        (
            "return call() if size <= INLINE_SIZE else",
            "return call() if True else",
            "long prompts are encoded on the event loop",
        ),
        (
            "if type(token) is not int or not 0 <= token < self.vocab_size:",
            "if type(token) is not int or not 0 <= token <= self.vocab_size:",
            "the first id behind the vocabulary reaches the model",
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
        (
            "if ids and ids[-1] in self.tokenizer.eos_token_ids:",
            "if False:",
            "the end of a turn is in the history twice",
        ),
    )
    + mutants(
        "engine/schedule/backpressure.py",
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
)

ANSWERING = SESSION + DETOKENIZER + PREPARE
