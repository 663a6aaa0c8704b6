"""Faults in what decides who computes what, and when."""

from __future__ import annotations

from tests.mutants.mutant import mutants

__all__ = ["SCHEDULING"]

SCHEDULER = mutants(
    "engine/scheduler.py",
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
        "if position == len(sequence.blocks) * block_size:",
        "if position > len(sequence.blocks) * block_size:",
        "a decoding row writes behind its last block",
    ),
    (
        "            if self.blocks.num_fenced:",
        "            if False:",
        "rows are preempted although blocks are on their way back",
    ),
    (
        "        if not self._prefilling and not self._admit(batch):\n            return\n",
        "",
        "decode rows alone are cut at a whole tile",
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
        "            if not self._admit(batch):\n                if self._finds_room",
        "            if True:\n                if self._finds_room",
        "those before the others come one in a step",
    ),
    (
        "not (self._free_slots or self._fenced_slots)",
        "not self._free_slots",
        "another row is preempted for a slot that is on its way back",
    ),
    (
        "self._sharing.find(sequence)[0]) <= self.blocks.num_fenced",
        "self._sharing.find(sequence)[0]) <= 0",
        "more rows are preempted for blocks that are on their way back",
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
    ("        sequence.request.logits.clear()", "        pass", "logits are doubled by a preemption"),
    ("        sequence.request.pooled = None", "        pass", "hidden states are added twice after a preemption"),
    (
        "        if sequence.last_step <= self._last_read:",
        "        if True:",
        "a slot is given away while a step in flight uses it",
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
        "        if decoding or self.waiting:\n            chunks",
        "        if True:\n            chunks",
        "a prompt that nobody waits for is cut",
    ),
    (
        "        if decoding or self.waiting:\n            chunks",
        "        if self.waiting:\n            chunks",
        "a step that others decode in is not rounded down",
    ),
    (
        "sample=end == known and sequence.remaining > 0,",
        "sample=end == known,",
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
    ("        sequence.last_step = batch.step", "        pass", "the fence does not know of prefill chunks"),
    ("            sequence.last_step = step\n", "", "the fence does not know of decode steps"),
    (
        "if sequence is None or sequence.last_step > self._last_read:",
        "if sequence is None:",
        "a preempted row comes back before its last token has been read",
    ),
    (
        "self.host.stored(sequence, len(shared), (known - 1) // self._block_size)",
        "self.host.stored(sequence, len(shared), known // self._block_size)",
        "a prompt that the host has whole leaves no token to compute",
    ),
    ("return own + len(self._running) - (", "return own - (", "an admission makes the next step preempt"),
    (
        "(self.blocks.num_available - idle_shared)",
        "self.blocks.num_available",
        "cached blocks that are shared count as room as well",
    ),
    ("        self.host.blocks.share(stored)", "        pass", "host blocks are given back that nobody took"),
    ("            cached = known - 1", "            cached = known", "a sibling has no token to compute"),
    (
        "cached = max(len(shared) * self._block_size, sequence.num_computed)",
        "cached = min(len(shared) * self._block_size, sequence.num_computed)",
        "what was swapped in is computed again",
    ),
    (
        "self.waiting.admit(sequence, known - cached)",
        "self.waiting.admit(sequence, known)",
        "users pay for tokens that were cached",
    ),
    (
        "            if sequence.state is SequenceState.FINISHED:\n                continue",
        "            if False:\n                continue",
        "an answer that has ended gets another token",
    ),
    ("            sequence.pending -= 1", "            pass", "unread tokens are never counted as read"),
    (
        "sequence.num_generated >= sequence.params.min_new_tokens",
        "sequence.num_generated > sequence.params.min_new_tokens",
        "min_new_tokens is one too many",
        "the device does not sample stop tokens that early, so that none comes at the border",
    ),
    (
        "elif sequence.remaining <= 0 and sequence.pending == 0:",
        "elif sequence.remaining <= 0:",
        "an answer ends before its tokens in flight are read",
    ),
    (
        "self._fenced_slots[0][0] <= step:",
        "self._fenced_slots[0][0] < step:",
        "slots come back a step late, and the last ones never",
    ),
    ("        self.host.step_read(step)", "        pass", "host blocks never come back from the fence"),
    (
        "first, end = len(known) - row.position,",
        "first, end = 0,",
        "prompt log-probabilities are doubled by a preemption",
    ),
    (
        "if sequence.slot != row.slot and not (failed and sequence.state is SequenceState.SWAPPED):",
        "if sequence.slot != row.slot:",
        "a row that failed and was swapped out comes back",
    ),
    ("            self.prefilled.append(request)", "            pass", "nobody learns when a prompt was computed"),
)

WAITING_QUEUE = mutants(
    "engine/waiting_queue.py",
    (
        "(request.terms.priority, request.id, sequence.index, ticket, sequence)",
        "(0, request.id, sequence.index, ticket, sequence)",
        "priorities are ignored",
    ),
    (
        "(request.terms.priority, request.id, sequence.index, ticket, sequence)",
        "(request.terms.priority, -request.id, sequence.index, ticket, sequence)",
        "who came last is served first",
    ),
    ("            if sequence in waiting:", "            if True:", "those who left are admitted"),
    (
        "        while self._late[0][-1] not in waiting:",
        "        while False:",
        "those who left are admitted after they let others go",
    ),
    ("                if not comes_too_late(sequence):", "                if True:", "rows are spent on late answers"),
    ("(priority, -deadline, ticket, sequence)", "(priority, deadline, ticket, sequence)", "the latest is tried first"),
    (
        "        if len(self._heap) + len(self._late) > 2 * self.num_waiting + 64:",
        "        if False:",
        "those who left stay in memory",
    ),
    (
        "num_tokens = len(sequence.token_ids) if is_first else sequence.num_generated",
        "num_tokens = len(sequence.token_ids)",
        "a prompt of several answers counts several times",
    ),
    ("        if self._passed >= MAX_PASSED:", "        if self._passed > MAX_PASSED:", "one more may pass"),
    (
        "            if self._clock() - since >= PATIENCE_S and not self._comes_too_late(longest):",
        "            if not self._comes_too_late(longest):",
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
        "        return None if self._comes_too_late(first) else first",
        "        return first",
        "rows are taken for what comes too late",
    ),
)

PREFILL_BUDGET = mutants(
    "engine/prefill_budget.py",
    (
        "(sequence, length - excess)] if length > excess else chunks",
        "(sequence, length - excess)] if length >= excess else chunks",
        "rounding to whole tiles leaves an empty chunk",
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
)

SCHEDULING = SCHEDULER + PREFILL_BUDGET + WAITING_QUEUE
