"""Faults in what decides who computes what, and when."""

from __future__ import annotations

from tests.mutants.mutant import mutants

__all__ = ["SCHEDULING"]

SCHEDULER = mutants(
    "engine/schedule/scheduler.py",
    (
        "        self.num_waiting += len(request.sequences)",
        "        self.num_waiting += 1",
        "the siblings of a new request are not counted as waiting",
    ),
    (
        "            self.waiting.discard(sequence)\n            self.host.release(sequence)",
        "            self.waiting.discard(sequence)",
        "a swapped sequence that is cancelled keeps its host blocks",
    ),
    (
        "self._decode_steps + 1 < self._prefill_interval",
        "self._decode_steps + 1 <= self._prefill_interval",
        "prompts wait one step longer than prefill_interval",
    ),
    (
        "            rows.sort(key=self.waiting.rank)",
        "            pass",
        "a row is copied to the host ahead of what it writes in the same step",
    ),
    (
        "if sequence.state is not SequenceState.DECODE or sequence.remaining <= 0:",
        "if sequence.state is not SequenceState.DECODE:",
        "rows decode past the length that was asked for",
    ),
    (
        "if position == sequence.capacity and",
        "if position > sequence.capacity and",
        "a decoding row writes behind its last block",
    ),
    (
        "            if self.blocks.num_fenced or (",
        "            if (",
        "rows are preempted although blocks are on their way back",
    ),
    (
        "return max(reversed(self._running), key=self.waiting.rank)",
        "return max(self._running, key=self.waiting.rank)",
        "the oldest row of a class is preempted, not the newest",
    ),
    (
        "return max(reversed(self._running), key=self.waiting.rank)",
        "return next(reversed(self._running))",
        "a row is preempted for one of a lower class",
    ),
    (
        "if self.waiting.rank(victim) <= self.waiting.rank(sequence):",
        "if self.waiting.rank(victim) < self.waiting.rank(sequence):",
        "a group takes rows from itself",
    ),
    (
        "            if not self._admit(batch):\n                if self.admission.finds_room",
        "            if True:\n                if self.admission.finds_room",
        "those before the others come one in a step",
    ),
    (
        "        self._prefilling = deque(sorted(self._prefilling, key=self.waiting.rank))",
        "        pass",
        "whose class is higher waits behind a long prompt",
    ),
    (
        "        self._put_prompts_in_order(batch)",
        "        pass",
        "whose class is higher is not admitted before a long prompt is through",
    ),
    (
        "                    if sequence.last_step <= self._last_read:",
        "                    if False:",
        "forced tokens wait for blocks that no window reaches",
    ),
    (
        "self.blocks.retire(sequence.blocks, sequence.last_step, self._last_read)",
        "self.blocks.retire(sequence.blocks, -1, self._last_read)",
        "blocks come back while a step in flight writes them",
    ),
    (
        "length = min(len(sequence.token_ids) - sequence.num_computed, budget)",
        "length = len(sequence.token_ids) - sequence.num_computed",
        "prompts are not cut at the token budget",
    ),
    ("            budget -= length", "            budget -= 1", "a step takes more prompt tokens than its budget"),
    (
        "        if chunks and (decoding or self.waiting):",
        "        if chunks:",
        "a prompt that nobody waits for is cut",
    ),
    (
        "        if chunks and (decoding or self.waiting):",
        "        if chunks and self.waiting:",
        "a step that others decode in is not rounded down",
    ),
    ("        sequence.last_step = batch.step", "        pass", "the fence does not know of prefill chunks"),
    ("            sequence.last_step = step\n", "", "the fence does not know of decode steps"),
    (
        "if victim is not sequence or sequence.state is SequenceState.DECODE:",
        "if True:",
        "a prompt that lacks a block gives up what it has, and begins again",
        "it comes back at once, with what the prefix cache or the host has of it",
    ),
    (
        "(self.groups.windowed and sequence.last_step > self._last_read)",
        "False",
        "a row is preempted although a window in flight is about to leave blocks",
    ),
    (
        "self._free_out_of_window(sequence, len(token_ids) - 1)",
        "self._free_out_of_window(sequence, sequence.num_computed)",
        "blocks come back that a step in flight sees",
    ),
    (
        "self._free_out_of_window(sequence, len(token_ids) - 1)",
        "self._free_out_of_window(sequence, len(token_ids) - 1 - block_size)",
        "a row holds a block that no window reaches",
    ),
    (
        "        self._free_out_of_window(sequence, end)",
        "        self._free_out_of_window(sequence, sequence.num_computed)",
        "blocks come back that a chunk in flight sees",
    ),
    (
        "        self._free_out_of_window(sequence, end)",
        "        pass",
        "a long prompt keeps blocks that no window reaches",
    ),
    (
        "len(self._running) * self.groups.count\n            self._extend",
        "0\n            self._extend",
        "a prompt takes the blocks that decoding rows are about to need",
    ),
    (
        "            if sequence.state is SequenceState.FINISHED:\n                continue",
        "            if False:\n                continue",
        "an answer that has ended gets another token",
    ),
    ("            sequence.pending -= 1", "            pass", "unread tokens are never counted as read"),
    (
        "elif sequence.remaining <= 0 and sequence.pending == 0:",
        "elif sequence.remaining <= 0:",
        "an answer ends before its tokens in flight are read",
    ),
    ("        self.host.step_read(step)", "        pass", "host blocks never come back from the fence"),
    (
        "if sequence.slot != row.slot and not (failed and sequence.state is SequenceState.SWAPPED):",
        "if sequence.slot != row.slot:",
        "a row that failed and was swapped out comes back",
    ),
    ("            self.prefilled.append(request)", "            pass", "nobody learns when a prompt was computed"),
)

SEQUENCE = mutants(
    "engine/schedule/sequence.py",
    (
        "return PrefixRoot(cache_salt=self.policy.cache_salt, adapter=adapter)",
        "return PrefixRoot(adapter=adapter)",
        "cache salts are ignored",
    ),
    (
        "return PrefixRoot(cache_salt=self.policy.cache_salt, adapter=adapter)",
        "return PrefixRoot(cache_salt=self.policy.cache_salt)",
        "adapters share blocks",
    ),
    ("        self.logits.clear()", "        pass", "logits are doubled by a preemption"),
    ("        self.pooled = None", "        pass", "hidden states are added twice after a preemption"),
    (
        "first, end = len(known) - position,",
        "first, end = 0,",
        "prompt log-probabilities are doubled by a preemption",
    ),
)

ADMISSION = mutants(
    "engine/schedule/admission.py",
    (
        "not self.slots.num_available",
        "not self.slots.num_free",
        "another row is preempted for a slot that is on its way back",
    ),
    (
        "self._missing_blocks(self._plan(sequence)) <= self.blocks.num_fenced",
        "self._missing_blocks(self._plan(sequence)) <= 0",
        "more rows are preempted for blocks that are on their way back",
    ),
    (
        "        if last_step <= last_read:",
        "        if True:",
        "a slot is given away while a step in flight uses it",
    ),
    (
        "if sequence is None or sequence.last_step > batch.last_read:",
        "if sequence is None:",
        "a preempted row comes back before its last token has been read",
    ),
    (
        "plan.num_blocks(self.blocks) + reserve - self.blocks",
        "plan.num_blocks(self.blocks) - self.blocks",
        "an admission makes the next step preempt",
    ),
    (
        "len(sequence.token_ids) - plan.cached)",
        "len(sequence.token_ids))",
        "users pay for tokens that were cached",
    ),
    (
        "self._fenced[0][0] <= step:",
        "self._fenced[0][0] < step:",
        "slots come back a step late, and the last ones never",
    ),
    (
        "host.stored(sequence, found.end, (known - 1) // size)",
        "host.stored(sequence, found.end, known // size)",
        "a prompt that the host has whole leaves no token to compute",
    ),
    (
        "return sum(self.num_own) + idle",
        "return sum(self.num_own)",
        "cached blocks that are shared count as room as well",
    ),
    ("            host.blocks.share(stored)", "            pass", "host blocks are given back that nobody took"),
    (
        "            cached, stored = known - 1,",
        "            cached, stored = known,",
        "a sibling has no token to compute",
    ),
    (
        "cached = max(found.end * size, sequence.num_computed)",
        "cached = min(found.end * size, sequence.num_computed)",
        "what was swapped in is computed again",
    ),
    (
        "first_own = max(first, found.end)",
        "first_own = found.end",
        "a swapped row takes blocks that it does not need",
    ),
)

WAITING_QUEUE = mutants(
    "engine/schedule/waiting_queue.py",
    (
        "(request.policy.priority, request.id, sequence.index, ticket)",
        "(0, request.id, sequence.index, ticket)",
        "priorities are ignored",
    ),
    (
        "(request.policy.priority, request.id, sequence.index, ticket)",
        "(request.policy.priority, -request.id, sequence.index, ticket)",
        "who came last is served first",
    ),
    (
        "        del waiting[ticket]",
        "        pass",
        "those who left are admitted",
    ),
    (
        "        while self._late[0][-1] not in waiting:",
        "        while False:",
        "those who left are admitted after they let others go",
    ),
    ("                if not misses_deadline(sequence):", "                if True:", "rows are spent on late answers"),
    ("(priority, -deadline, ticket)", "(priority, deadline, ticket)", "the latest is tried first"),
    (
        "        if len(self._heap) + len(self._late) > 2 * len(waiting) + 64:",
        "        if False:",
        "those who left stay in memory",
    ),
    (
        "num_tokens = len(sequence.token_ids) if is_first else sequence.num_generated",
        "num_tokens = len(sequence.token_ids)",
        "a prompt of several answers counts several times",
    ),
    ("            oldest.keeps_row = True", "            pass", "a prompt that has its row is never computed"),
    ("        if ids[0] != before:", "        if True:", "a prompt that is passed over has no patience to lose"),
    ("        if self._passed >= MAX_PASSED:", "        if self._passed > MAX_PASSED:", "one more may pass"),
    (
        "            if self._clock() - since >= PATIENCE_S and not self._misses_deadline(longest):",
        "            if not self._misses_deadline(longest):",
        "who was passed comes next although it has not waited long",
    ),
    (
        "if user is not None and sequence.last_step < 0:",
        "if user is not None:",
        "users pay for what a preemption makes the engine compute again",
    ),
    ("            self._passed += 1", "            pass", "a request may be passed over for ever"),
    ("            self._passed = 0", "            pass", "who waits since shortly inherits the patience of others"),
    ("        self.num_tokens += tokens", "        pass", "tokens that wait are not counted"),
    ("            user.queued_requests += requests", "            pass", "a user may fill the queue beyond its part"),
    ("                    user.current += 1", "                    pass", "generated tokens cost nothing"),
    (
        "return priority if user is None else user.group",
        "return priority",
        "preemption ignores the groups of quality of service",
    ),
    (
        "        if sequence.keeps_row:",
        "        if False:",
        "who has lost patience gives the row up at once",
    ),
    (
        "        sequence.keeps_row = False\n",
        "",
        "who was patient once takes the rows of its own group when preempted",
    ),
    (
        "        first = self._first_by_rule()\n",
        "        first = self.first() or self._first_by_rule()\n",
        "the first group waits for the row of one who has lost patience",
    ),
    ("if not self._waiting or self.quality is None:", "if not self._waiting:", "priorities take rows"),
    (
        "        return None if self._misses_deadline(first) else first",
        "        return first",
        "rows are taken for what comes too late",
    ),
)

CHUNKED_PREFILL = mutants(
    "engine/schedule/chunked_prefill.py",
    (
        "        if shorter <= 0:",
        "        if shorter < 0:",
        "rounding to whole tiles leaves an empty chunk",
    ),
    (
        "return chunks if later and others * tile < total else ",
        "return ",
        "a prompt is cut although it loses more than the others gain",
    ),
    (
        "later = -(-(left - shorter) // self.max_tokens) > -(-(left - length) // self.max_tokens)",
        "later = True",
        "a prompt that loses nothing is not cut",
    ),
    (
        "max(whole - len(decoding), -(-whole // 4))",
        "whole",
        "decode rows do not count in the step that they wait for",
    ),
    (
        "max(whole - len(decoding), -(-whole // 4))",
        "max(whole - len(decoding), 0)",
        "prompts starve behind many decode rows",
    ),
    (
        " or not any(sequence.request.delivery.streaming for sequence in decoding)",
        "",
        "a step is short although nobody decodes",
    ),
    (
        "not any(sequence.request.delivery.streaming for sequence in decoding)",
        "not decoding",
        "a step is short for whole answers, which nobody reads before their end",
    ),
    (
        "for sequence in decoding)",
        "for sequence in decoding[:1])",
        "streams pause for prompts where the oldest answer is not streamed",
    ),
    (
        "sample = end == known and sequence.remaining > 0",
        "sample = end == known",
        "a token is sampled after prompts that are only scored",
    ),
    (
        "next_token=sequence.token_ids[end] if",
        "next_token=sequence.token_ids[start] if",
        "the last token of a chunk is scored against the wrong successor",
    ),
    (
        'pooling=request.pooling if end == known or request.pooling == "mean" else None',
        "pooling=request.pooling",
        "pooling of the last token adds those of earlier chunks",
    ),
)

LOOP = mutants(
    "engine/loop/engine_loop.py",
    (
        "if steps.oldest_is_done and not turns.readers_first:\n            advanced",
        "if steps.oldest_is_done:\n            advanced",
        "two steps that are over at once come as one chunk",
    ),
    (
        "        if steps.oldest_is_done and not turns.readers_first:\n            turns.wake()",
        "        pass",
        "a step that is over when it is submitted is never read",
    ),
)
TURNS = mutants(
    "engine/loop/turns.py",
    (
        "self._event_loop.call_soon(self._take_scheduled, context=self._context)",
        "self._event_loop.call_soon(self._take_scheduled)",
        "turns take place in a request's context",
    ),
    (
        "        if self._steps.oldest_is_done:\n            self._take()",
        "        pass",
        "a step that was over before the readers ran is never read",
    ),
)

SCHEDULING = SCHEDULER + SEQUENCE + ADMISSION + CHUNKED_PREFILL + WAITING_QUEUE + LOOP + TURNS
