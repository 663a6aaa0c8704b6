"""FakeDevice: runs steps on a paged store of token ids, and refuses what a real device would get wrong in silence."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from asyncllm.batch import (
    Batch,
    Command,
    Limits,
    PrefillRow,
    Sleep,
    SlotStart,
    StepOutput,
    TokenLogprobs,
    UpdateWeights,
    Wake,
)

__all__ = ["FakeDevice", "Oracle", "StepViolation", "hash_hidden", "hash_oracle", "script_oracle"]

Oracle = Callable[[list[int], SlotStart], int]
"""(all tokens of the row so far, how its slot started) -> the next token."""


class StepViolation(AssertionError):
    """A step that would corrupt the KV cache of a real device; the message names the step, slot and block."""


def hash_oracle(vocab_size: int) -> Oracle:
    """The next token is a hash of the row's whole history, and of its seed unless it is greedy."""

    def next_token(history: list[int], start: SlotStart) -> int:
        seed = 0 if start.params.greedy else start.params.seed
        return zlib.crc32(array("q", history).tobytes(), seed & 0xFFFFFFFF) % vocab_size

    return next_token


def hash_hidden(tokens: Sequence[int], hidden_size: int, first: int = 0) -> list[list[float]]:
    """Made-up hidden states of the tokens from `first` on: each depends on all tokens up to its own."""
    hidden = []
    key = 0
    for position, token in enumerate(tokens):
        key = zlib.crc32(token.to_bytes(8, "little"), key)
        if position >= first:
            dice = random.Random(key)
            hidden.append([dice.uniform(-1, 1) for _ in range(hidden_size)])
    return hidden


def script_oracle(answer: Callable[[list[int]], Sequence[int]], eos_token_id: int) -> Oracle:
    """Say `answer(prompt ids)` token by token, then `eos_token_id` for ever."""

    def next_token(history: list[int], start: SlotStart) -> int:
        script = answer(history[: start.num_prompt])
        said = len(history) - start.num_prompt
        return script[said] if said < len(script) else eos_token_id

    return next_token


class _Slot:
    """A row of the device's state tables, from one SlotStart to the next."""

    def __init__(self, start: SlotStart) -> None:
        self.start = start
        self.blocks: list[int] = []
        self.history: list[int] = []  # the tokens at positions 0.., as this slot first saw or wrote them
        self.serials: list[int] = []  # which write put each of them there
        self.last_token: int | None = None


class FakeDevice:
    """Executes batches one after the other, as the state tables and KV pool of a real device would.

    The store keeps a token id per (block, offset), with the serial number of the write that put it there. A row's next
    token is computed from what is read back through its block table, so cross-talk and lost blocks change the answer;
    they also raise StepViolation, as do uncovered positions, reads of cells never written, and ambiguous copies. Blocks
    of the host keep tokens and serials as well, so that a block's content is followed down and up again.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 16,
        vocab_size: int = 258,
        hidden_size: int = 16,
        max_position: int = 4096,
        max_steps_in_flight: int = 2,
        num_host_blocks: int = 0,
        min_copied_tokens: int = 1,
        oracle: Oracle | None = None,
        row_failure: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        """`row_failure(history)` gives the error of a row that shall fail inside the step, else None."""
        self.limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_position=max_position,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_slots=num_slots,
            max_steps_in_flight=max_steps_in_flight,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            device="fake",
            architecture="Fake",
        )
        self.oracle = oracle or hash_oracle(vocab_size)
        self.row_failure = row_failure
        self.num_steps = 0
        self.num_tokens = 0
        self._tokens = [[-1] * block_size for _ in range(num_blocks)]
        self._serials = [[0] * block_size for _ in range(num_blocks)]
        self._host_cells: list[tuple[list[int], list[int]] | None] = [None] * num_host_blocks
        """Tokens and serials of each host block that was copied to."""
        self._serial = 0
        self._slots: dict[int, _Slot] = {}
        self._last_step = -1
        self.awake = True
        self.weights: dict[str, Any] = {}
        """Every weight that `UpdateWeights` has brought, by name; an `oracle` may read it."""

    def carry_out(self, command: Command) -> None:
        """What was written so far is as if it never was, so that a step which reads it is a violation; except for Wake,
        before which no step may run."""
        match command:
            case UpdateWeights(weights):
                self.weights |= weights
            case Sleep():
                self.awake = False
            case Wake(parts):
                self.awake |= "kv_cache" in parts
                return
        self._tokens = [[-1] * len(cells) for cells in self._tokens]
        self._host_cells = [None] * len(self._host_cells)
        self._slots.clear()

    def step(self, batch: Batch) -> StepOutput:
        """Run one step. Raises StepViolation if it, or one before it, would have corrupted a real cache."""
        if not self.awake:
            raise StepViolation(f"step {batch.step}: comes while the model sleeps")
        self._check_shape(batch)
        for start in batch.starts:
            self._slots[start.slot] = _Slot(start)
        for slot, index, ids in batch.new_blocks:
            self._set_blocks(batch.step, slot, index, ids)
        self._swap(batch)
        self._copy(batch)
        self._serial += 1  # one serial per step: two rows that write one cell in a step are seen by the position check
        written: set[tuple[int, int]] = set()
        for row in batch.prefill:
            self._begin(batch.step, row)
        for slot in batch.decode:
            state = self._slot(batch.step, slot)
            if state.last_token is None:
                raise self._violation(batch.step, slot, "decodes before anything was sampled for it")
            self._write(batch.step, slot, len(state.history), [state.last_token], written)
        for row in batch.prefill:
            self._write(batch.step, row.slot, row.position, row.tokens, written)
        output = StepOutput(step=batch.step, slots=[], tokens=[], logprobs={}, prompt_logprobs={}, logits={}, errors={})
        for slot in batch.decode:
            self._sample(batch.step, slot, output)
        for row in batch.prefill:
            self._score(row, output)
            if row.sample:
                self._sample(batch.step, row.slot, output)
            else:
                self._compute(row, self._read(batch.step, row.slot), output)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        return output

    def _check_shape(self, batch: Batch) -> None:
        if batch.step <= self._last_step:
            raise StepViolation(f"step {batch.step} came after step {self._last_step}")
        self._last_step = batch.step
        if not batch.decode and not batch.prefill and not batch.copies and not batch.swaps:
            raise StepViolation(f"step {batch.step} has nothing to do")
        for what, slots in (
            ("rows", [*batch.decode, *(row.slot for row in batch.prefill)]),
            ("starts", [start.slot for start in batch.starts]),
        ):
            if len(set(slots)) != len(slots):
                raise StepViolation(f"step {batch.step}: a slot is named twice among its {what}: {slots}")
            if any(not 0 <= slot < self.limits.num_slots for slot in slots):
                raise StepViolation(f"step {batch.step}: slot out of range among its {what}: {slots}")

    def _set_blocks(self, step: int, slot: int, index: int, ids: list[int]) -> None:
        blocks = self._slot(step, slot).blocks
        if not 0 <= index <= len(blocks):
            raise self._violation(step, slot, f"gets blocks at {index}, but has {len(blocks)}")
        for block in ids:
            if not 0 <= block < self.limits.num_blocks:
                raise self._violation(step, slot, f"gets block {block}, which does not exist")
        blocks[index : index + len(ids)] = ids
        if len(set(blocks)) != len(blocks):
            raise self._violation(step, slot, f"has a block twice in its table: {blocks}")

    def _swap(self, batch: Batch) -> None:
        """Copy blocks down, then up, with the serials of their cells: a block's content is the same in both places."""
        step, swaps = batch.step, batch.swaps
        for pairs, from_size, to_size in (
            (swaps.swap_out, self.limits.num_blocks, self.limits.num_host_blocks),
            (swaps.swap_in, self.limits.num_host_blocks, self.limits.num_blocks),
        ):
            if any(not 0 <= source < from_size or not 0 <= destination < to_size for source, destination in pairs):
                raise StepViolation(f"step {step}: swaps a block that does not exist: {pairs}")
            if len({destination for _, destination in pairs}) != len(pairs):
                raise StepViolation(f"step {step}: swaps two blocks to the same place: {pairs}")
        for source, destination in swaps.swap_out:
            if self._tokens[source][0] < 0:
                raise StepViolation(f"step {step}: copies down block {source}, which was never written")
            self._host_cells[destination] = (list(self._tokens[source]), list(self._serials[source]))
        for source, destination in swaps.swap_in:
            cells = self._host_cells[source]
            if cells is None:
                raise StepViolation(f"step {step}: copies up host block {source}, which was never copied to")
            self._tokens[destination], self._serials[destination] = list(cells[0]), list(cells[1])

    def _copy(self, batch: Batch) -> None:
        destinations = [destination for _, destination in batch.copies]
        sources = {source for source, _ in batch.copies}
        if len(set(destinations)) != len(destinations) or sources & set(destinations):
            raise StepViolation(f"step {batch.step}: copies depend on their order: {batch.copies}")
        for source, destination in batch.copies:
            if self._tokens[source][0] < 0:
                raise StepViolation(f"step {batch.step}: copies block {source}, which was never written")
            self._serial += 1
            self._tokens[destination] = list(self._tokens[source])
            self._serials[destination] = [self._serial] * self.limits.block_size
            for state in self._slots.values():
                # A table that already names the destination gets it as its own copy; what it read before stays equal.
                if destination in state.blocks:
                    self._resee(state, state.blocks.index(destination))

    def _resee(self, state: _Slot, index: int) -> None:
        """Take over the serials of a block that a copy put in the place of a shared one."""
        first = index * self.limits.block_size
        for offset in range(min(self.limits.block_size, max(0, len(state.history) - first))):
            if self._tokens[state.blocks[index]][offset] == state.history[first + offset]:
                state.serials[first + offset] = self._serials[state.blocks[index]][offset]

    def _begin(self, step: int, row: PrefillRow) -> None:
        """On a slot's first chunk, take what lies before it from the prefix cache; later chunks must join up."""
        state = self._slot(step, row.slot)
        if not row.tokens:
            raise self._violation(step, row.slot, "has an empty chunk")
        if state.last_token is not None:
            raise self._violation(step, row.slot, "prefills after it began to decode")
        if not state.history and row.position > 0:
            cells = [self._cell(step, row.slot, position) for position in range(row.position)]
            state.history = [self._tokens[block][offset] for block, offset in cells]
            state.serials = [self._serials[block][offset] for block, offset in cells]
            if -1 in state.history:
                raise self._violation(
                    step, row.slot, f"reads position {state.history.index(-1)}, which was never written"
                )
            known = state.start.token_ids
            if known and state.history != known[: row.position]:
                raise self._violation(step, row.slot, f"finds {state.history} in its blocks, not its own {known}")
        if row.position != len(state.history):
            raise self._violation(
                step, row.slot, f"prefills at {row.position}, but its cache ends at {len(state.history)}"
            )
        num_known = state.start.num_tokens
        end = row.position + len(row.tokens)
        if end > num_known or (row.sample and end != num_known):
            raise self._violation(
                step, row.slot, f"chunk ends at {end} of {num_known} known tokens with sample={row.sample}"
            )

    def _write(self, step: int, slot: int, position: int, tokens: list[int], written: set[tuple[int, int]]) -> None:
        state = self._slot(step, slot)
        if position + len(tokens) > self.limits.max_position:
            raise self._violation(step, slot, f"writes past max_position {self.limits.max_position}")
        for index, token in enumerate(tokens):
            if not 0 <= token < self.limits.vocab_size:
                raise self._violation(step, slot, f"token {token} is not in the vocabulary")
            cell = self._cell(step, slot, position + index)
            if cell in written:
                raise self._violation(step, slot, f"writes cell {cell}, which another row writes in this step")
            written.add(cell)
            block, offset = cell
            self._tokens[block][offset] = token
            self._serials[block][offset] = self._serial
            state.history.append(token)
            state.serials.append(self._serial)

    def _read(self, step: int, slot: int) -> list[int]:
        """The row's tokens, read back through its block table."""
        state = self._slot(step, slot)
        size = self.limits.block_size
        length = len(state.history)
        tokens: list[int] = []
        serials: list[int] = []
        for block in state.blocks[: -(-length // size)]:
            tokens += self._tokens[block]
            serials += self._serials[block]
        tokens, serials = tokens[:length], serials[:length]
        if tokens != state.history or serials != state.serials:
            position = next(i for i in range(length) if (tokens[i], serials[i]) != (state.history[i], state.serials[i]))
            raise self._violation(
                step,
                slot,
                f"lost position {position}: block {state.blocks[position // size]} was written by somebody else "
                f"(token {state.history[position]} became {tokens[position]})",
            )
        return tokens

    def _sample(self, step: int, slot: int, output: StepOutput) -> None:
        state = self._slot(step, slot)
        history = self._read(step, slot)
        params = state.start.params
        error = self.row_failure(history) if self.row_failure is not None else None
        if error is not None:
            output.errors[slot] = error
        token = self.oracle(history, state.start)
        banned = set(params.bad_words)
        if len(history) - state.start.num_prompt < params.min_new_tokens:
            banned.update((token_id,) for token_id in params.stop_token_ids)
        while (token,) in banned:
            token = (token + 1) % self.limits.vocab_size
        state.last_token = token
        output.slots.append(slot)
        output.tokens.append(token)
        if params.logprobs is not None:
            output.logprobs[slot] = self._logprobs(token, token, params.logprobs)

    def _compute(self, row: PrefillRow, history: list[int], output: StepOutput) -> None:
        """What a row without a token gives: an error, or the sum of made-up hidden states that its `pooling` asks
        for."""
        error = self.row_failure(history) if self.row_failure is not None else None
        if error is not None:
            output.errors[row.slot] = error
        if row.pooling is None:
            return
        first = row.position if row.pooling == "mean" else len(history) - 1
        hidden = hash_hidden(history, self.limits.hidden_size, first)
        output.pooled[row.slot] = [sum(column) for column in zip(*hidden, strict=True)]

    def _score(self, row: PrefillRow, output: StepOutput) -> None:
        successors = row.tokens[1:] + ([] if row.next_token is None else [row.next_token])
        if row.prompt_logprobs is not None:
            output.prompt_logprobs[row.slot] = [
                self._logprobs(following, (following + 1) % self.limits.vocab_size, row.prompt_logprobs)
                for following in successors
            ]
        if row.output_logits:
            output.logits[row.slot] = [
                [float(token == candidate) for candidate in range(self.limits.vocab_size)] for token in row.tokens
            ]

    def _logprobs(self, chosen: int, best: int, count: int) -> TokenLogprobs:
        """`chosen` first, then `best` and the ids after it, each half as likely as the one before."""
        ranked = [((best + rank) % self.limits.vocab_size, -0.6931471805599453 * (rank + 1)) for rank in range(count)]
        own = dict(ranked).get(chosen, -0.6931471805599453 if chosen == best else -20.0)
        return [(chosen, own), *ranked]

    def _cell(self, step: int, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.limits.block_size)
        blocks = self._slot(step, slot).blocks
        if index >= len(blocks):
            raise self._violation(step, slot, f"has no block for position {position}: its table is {blocks}")
        return blocks[index], offset

    def _slot(self, step: int, slot: int) -> _Slot:
        if slot not in self._slots:
            raise self._violation(step, slot, "was never started")
        return self._slots[slot]

    def _violation(self, step: int, slot: int, what: str) -> StepViolation:
        return StepViolation(f"step {step}: slot {slot} {what}")
