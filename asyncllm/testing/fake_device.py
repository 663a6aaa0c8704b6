"""FakeDevice: runs steps on a paged store of token ids, and rejects steps that would silently produce wrong results on
a real device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncllm.protocol import (
    Batch,
    Command,
    Limits,
    LoadAdapter,
    PrefillRow,
    Sleep,
    SlotStart,
    StepOutput,
    TokenLogprobs,
    UpdateWeights,
    Wake,
)
from asyncllm.testing.oracles import Oracle, hash_hidden, hash_oracle

__all__ = ["FakeDevice", "StepViolation"]


class StepViolation(AssertionError):
    """A step that would corrupt the KV cache of a real device. The message names the step, slot and block."""


_Past = tuple[int, Any]
"""A token and the past of the previous one: everything that the token's keys and values may depend on."""


def _same(one: _Past | None, other: _Past | None) -> bool:
    """Return whether two pasts are the same tokens."""
    while one is not other:
        if one is None or other is None or one[0] != other[0]:
            return False
        one, other = one[1], other[1]
    return True


class _Cells:
    """The cells of a block: for each the token with its past, and the serial number of the write that stored it."""

    __slots__ = ("pasts", "serials", "state")

    def __init__(self, size: int) -> None:
        self.pasts: list[_Past | None] = [None] * size
        self.serials = [0] * size
        self.state: _Past | None = None
        """The token written last, in any cell."""

    def copy(self) -> _Cells:
        cells = _Cells(0)
        cells.pasts, cells.serials, cells.state = list(self.pasts), list(self.serials), self.state
        return cells


class _Slot:
    """A row of the device's state tables, from one SlotStart to the next."""

    def __init__(self, start: SlotStart, num_groups: int) -> None:
        self.start = start
        self.tables: list[list[int | None]] = [[] for _ in range(num_groups)]
        """By block group. None: a block that no window reaches, or that now serves another position."""
        self.root: _Past | None = (-start.adapter, None) if start.adapter else None
        """The past of its first token, since keys and values depend on the adapter."""
        self.history: list[int] = []
        """The tokens from position 0 on, as this slot first read or wrote them."""
        self.past: _Past | None = self.root
        """The past of the last token."""
        self.serials: list[list[int]] = [[] for _ in range(num_groups)]
        """By block group: for each token, the serial number of the write that stored it."""
        self.last_token: int | None = None
        self.num_told = start.num_tokens
        """Number of tokens known to the sampling state."""


class _ComputedStep:
    """A completed step."""

    launched = True

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> None:
        pass

    def output(self) -> StepOutput:
        return self._output


class FakeDevice:
    """Executes batches one after another, modelling the state tables and KV pool of a real device.

    For each (block, offset) the store holds a token id with its whole prefix, and the serial number of the write that
    stored it. A row reads its block tables as attention does, in each block group no further back than its window. It
    raises StepViolation for content that is not its own, for uncovered positions, for reads of cells never written, and
    for ambiguous copies. If blocks keep a state, a token is computed from the state in the previous token's block,
    which must be the state after the row's own tokens. Host blocks have cells as well, so a block's content is tracked
    to the host and back.
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
        windows: Sequence[int | None] = (None,),
        keeps_state: bool = False,
        num_adapter_slots: int = 0,
        num_host_adapters: int = 64,
        oracle: Oracle | None = None,
        row_failure: Callable[[list[int]], str | None] | None = None,
        forces: Callable[[list[int]], int] | None = None,
    ) -> None:
        """`row_failure(history)` returns the error of a row that should fail inside the step, or None.
        `forces(history)` returns the number of tokens forced after these: the oracle's tokens, up to a row that fails.
        `windows` (of at least two positions) and `keeps_state`: see `Limits`."""
        if any(window is not None and window < 2 for window in windows):
            raise ValueError(f"a window shows at least the token before, not {windows}")
        self.runs_ahead = self.blocked = False
        """Like an agent that computes a step when it is launched."""
        self.limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=tuple(windows),
            keeps_state=keeps_state,
            max_position=max_position,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            labels=("LABEL_0",),
            num_slots=num_slots,
            max_steps_in_flight=max_steps_in_flight,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            num_adapter_slots=num_adapter_slots,
            num_host_adapters=num_host_adapters,
            device="fake",
            architecture="Fake",
        )
        self.oracle = oracle or hash_oracle(vocab_size)
        self.row_failure = row_failure
        self.forces = forces
        self._least_forced = 0
        self.num_steps = 0
        self.num_tokens = 0
        self._cells = [_Cells(block_size) for _ in range(num_blocks)]
        self._host_cells: list[_Cells | None] = [None] * num_host_blocks
        """Cells of each host block that has been written."""
        self._serial = 0
        self._slots: dict[int, _Slot] = {}
        self.adapters: set[int] = set()
        """Numbers of the loaded adapters. A test may add some."""
        self._in_adapter_slots: dict[int, int] = {}
        self._last_step = -1
        self.awake = True
        self.weights: dict[str, Any] = {}
        """Every weight set by `UpdateWeights`, by name. An `oracle` may read them."""

    def carry_out(self, command: Command) -> None:
        """Mark everything written so far as never written, so that a step which reads it is a violation. Only Wake
        keeps it, since no step may run before it."""
        match command:
            case UpdateWeights(weights):
                self.weights |= weights
            case Sleep():
                self.awake = False
            case Wake(parts):
                self.awake |= "kv_cache" in parts
                return
        self._cells = [_Cells(self.limits.block_size) for _ in self._cells]
        self._host_cells = [None] * len(self._host_cells)
        self._slots.clear()

    def load_adapter(self, adapter: LoadAdapter) -> str:
        """Record an adapter as loaded. Raises AssertionError if host memory has no room for it."""
        self.adapters.add(adapter.number)
        assert len(self.adapters) <= self.limits.num_host_adapters, "more adapters than host memory has room for"
        return adapter.digest or f"digest of {adapter.path}"

    def drop_adapter(self, number: int) -> None:
        """Unload an adapter. Raises KeyError if it is not loaded."""
        self.adapters.remove(number)

    def launch(self, batch: Batch) -> _ComputedStep:
        """Run one step, as `step` does."""
        return _ComputedStep(self.step(batch))

    def resume(self) -> None:
        """Do nothing, since no step waits to be resumed."""

    def survives(self, error: BaseException) -> bool:
        """Return whether an error of a step affects only its own rows."""
        return isinstance(error, Exception) and not isinstance(error, StepViolation)

    def step(self, batch: Batch) -> StepOutput:
        """Run one step. Raises StepViolation if it or an earlier step would have corrupted a real cache."""
        if not self.awake:
            raise StepViolation(f"step {batch.step}: comes while the model sleeps")
        self._check_shape(batch)
        self._least_forced = batch.min_forced
        for start in batch.starts:
            self._put_adapter(batch.step, start)
            self._slots[start.slot] = _Slot(start, len(self.limits.windows))
        for slot, group, index, ids in batch.new_blocks:
            self._set_blocks(batch.step, slot, group, index, ids)
        self._swap(batch)
        self._copy(batch)
        self._serial += 1  # One serial per step: the position check detects two rows that write one cell in a step.
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
            self._sample(batch.step, slot, len(self._slots[slot].history) - 1, output)
        for row in batch.prefill:
            self._score(row, output)
            if row.sample:
                self._slots[row.slot].num_told += len(row.forced)
                self._sample(batch.step, row.slot, row.position, output)
            else:
                self._compute(row, self._read(batch.step, row.slot, row.position), output)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        return output

    def _put_adapter(self, step: int, start: SlotStart) -> None:
        """Record the slot of a sequence's adapter."""
        if (start.adapter > 0) != (start.adapter_slot >= 0):
            raise self._violation(step, start.slot, "has an adapter or a slot for one, and not both")
        if not start.adapter:
            return
        if start.adapter_slot >= self.limits.num_adapter_slots or start.adapter not in self.adapters:
            raise self._violation(step, start.slot, f"asks for adapter {start.adapter} in slot {start.adapter_slot}")
        self._in_adapter_slots[start.adapter_slot] = start.adapter

    def _check_shape(self, batch: Batch) -> None:
        if batch.step <= self._last_step:
            raise StepViolation(f"step {batch.step} came after step {self._last_step}")
        self._last_step = batch.step
        # A step without rows may give blocks to a row that waits for more.
        if not (batch.decode or batch.prefill or batch.starts or batch.new_blocks or batch.copies or batch.swaps):
            raise StepViolation(f"step {batch.step} has nothing to do")
        for what, slots in (
            ("rows", [*batch.decode, *(row.slot for row in batch.prefill)]),
            ("starts", [start.slot for start in batch.starts]),
        ):
            if len(set(slots)) != len(slots):
                raise StepViolation(f"step {batch.step}: a slot is named twice among its {what}: {slots}")
            if any(not 0 <= slot < self.limits.num_slots for slot in slots):
                raise StepViolation(f"step {batch.step}: slot out of range among its {what}: {slots}")

    def _set_blocks(self, step: int, slot: int, group: int, index: int, ids: list[int]) -> None:
        state = self._slot(step, slot)
        if not 0 <= group < len(state.tables):
            raise self._violation(step, slot, f"gets blocks in group {group}, which does not exist")
        table, window = state.tables[group], self.limits.windows[group]
        if window is not None and not table:
            table += [None] * index
        if not 0 <= index <= len(table):
            raise self._violation(step, slot, f"gets blocks at {index}, but has {len(table)}")
        for block in ids:
            if not 0 <= block < self.limits.num_blocks:
                raise self._violation(step, slot, f"gets block {block}, which does not exist")
        for other, own in zip(self.limits.windows, state.tables, strict=True):
            if other is not None:
                # A block from an earlier position that is now out of reach may be used again.
                own[:] = [None if block in ids else block for block in own]
        table[index : index + len(ids)] = ids
        held = [block for own in state.tables for block in own if block is not None]
        if len(set(held)) != len(held):
            raise self._violation(step, slot, f"has a block twice in its tables: {state.tables}")

    def _swap(self, batch: Batch) -> None:
        """Copy blocks to the host, then back, with the serials of their cells: a block has the same content in both
        places."""
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
            if self._cells[source].pasts[0] is None:
                raise StepViolation(f"step {step}: copies down block {source}, which was never written")
            self._host_cells[destination] = self._cells[source].copy()
        for source, destination in swaps.swap_in:
            cells = self._host_cells[source]
            if cells is None:
                raise StepViolation(f"step {step}: copies up host block {source}, which was never copied to")
            self._cells[destination] = cells.copy()

    def _copy(self, batch: Batch) -> None:
        destinations = [destination for _, destination in batch.copies]
        sources = {source for source, _ in batch.copies}
        if len(set(destinations)) != len(destinations) or sources & set(destinations):
            raise StepViolation(f"step {batch.step}: copies depend on their order: {batch.copies}")
        for source, destination in batch.copies:
            if self._cells[source].pasts[0] is None:
                raise StepViolation(f"step {batch.step}: copies block {source}, which was never written")
            self._serial += 1
            cells = self._cells[destination] = self._cells[source].copy()
            cells.serials = [self._serial] * self.limits.block_size
            for state in self._slots.values():
                # A table that already names the destination gets its own copy; what it has read so far is unchanged.
                for group, table in enumerate(state.tables):
                    if destination in table:
                        self._resee(state, group, table.index(destination), cells)

    def _resee(self, state: _Slot, group: int, index: int, cells: _Cells) -> None:
        """Take over the serials of a copied block that replaces a shared one."""
        first = index * self.limits.block_size
        for offset in range(min(self.limits.block_size, max(0, len(state.history) - first))):
            past = cells.pasts[offset]
            if past is not None and past[0] == state.history[first + offset]:
                state.serials[group][first + offset] = cells.serials[offset]

    def _begin(self, step: int, row: PrefillRow) -> None:
        """Before a slot's first chunk, read its prefix from the cache. Later chunks must be contiguous."""
        state = self._slot(step, row.slot)
        if not row.tokens:
            raise self._violation(step, row.slot, "has an empty chunk")
        if not state.history and row.position > 0:
            self._take_beginning(step, row)
        if row.position != len(state.history):
            raise self._violation(
                step, row.slot, f"prefills at {row.position}, but its cache ends at {len(state.history)}"
            )
        end = row.position + len(row.tokens)
        if state.last_token is not None:
            known = list(state.history)
            for token in row.tokens:
                if self.forces is None or token != self.oracle(known, state.start):
                    raise self._violation(step, row.slot, f"prefills {token} after it began to decode, unforced")
                known.append(token)
            return
        num_known = state.start.num_tokens
        if end > num_known or (row.sample and end != num_known):
            raise self._violation(
                step, row.slot, f"chunk ends at {end} of {num_known} known tokens with sample={row.sample}"
            )

    def _take_beginning(self, step: int, row: PrefillRow) -> None:
        """Read the tokens before the slot's first chunk from its blocks."""
        state, slot = self._slots[row.slot], row.slot
        for position in range(row.position):
            for group, serials in enumerate(state.serials):
                if position < self._first_seen(group, row.position):
                    serials.append(0)
                    continue
                block, offset = self._cell(step, slot, group, position)
                past = self._cells[block].pasts[offset]
                if past is None:
                    raise self._violation(step, slot, f"reads position {position}, which was never written")
                serials.append(self._cells[block].serials[offset])
                state.past = past
        past = state.past
        while past is not None and past[0] >= 0:
            state.history.append(past[0])
            past = past[1]
        if past != state.root:
            raise self._violation(step, slot, "finds what was computed with another adapter")
        state.history.reverse()
        known = state.start.token_ids
        if known and state.history != known[: row.position]:
            raise self._violation(step, slot, f"finds {state.history} in its blocks, not its own {known}")

    def _first_seen(self, group: int, position: int) -> int:
        """Return the first position that a token at `position` reads in a group."""
        window = self.limits.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _write(self, step: int, slot: int, position: int, tokens: list[int], written: set[tuple[int, int]]) -> None:
        state = self._slot(step, slot)
        if position + len(tokens) > self.limits.max_position:
            raise self._violation(step, slot, f"writes past max_position {self.limits.max_position}")
        start = state.start
        if start.adapter and self._in_adapter_slots.get(start.adapter_slot) != start.adapter:
            raise self._violation(step, slot, f"has lost adapter {start.adapter} from slot {start.adapter_slot}")
        for index, token in enumerate(tokens):
            self._check_state(step, slot, position + index)
            if not 0 <= token < self.limits.vocab_size:
                raise self._violation(step, slot, f"token {token} is not in the vocabulary")
            state.past = (token, state.past)
            state.history.append(token)
            for group, serials in enumerate(state.serials):
                cell = self._cell(step, slot, group, position + index)
                if cell in written:
                    raise self._violation(step, slot, f"writes cell {cell}, which another row writes in this step")
                written.add(cell)
                block, offset = cell
                self._cells[block].pasts[offset] = self._cells[block].state = state.past
                self._cells[block].serials[offset] = self._serial
                serials.append(self._serial)

    def _check_state(self, step: int, slot: int, position: int) -> None:
        """Compare the states that the token at `position` reads with the row's own tokens."""
        if not self.limits.keeps_state or not position:
            return
        state = self._slots[slot]
        for group in range(len(state.tables)):
            block, _ = self._cell(step, slot, group, position - 1)
            if not _same(self._cells[block].state, state.past):
                raise self._violation(step, slot, f"goes on at {position} from a state of block {block}, not its own")

    def _read(self, step: int, slot: int, first: int) -> list[int]:
        """Return the row's tokens, after checking all that its queries from position `first` on read.

        A cell's serial tells which step wrote it and so its content. Serials are compared block by block.
        """
        state, size = self._slot(step, slot), self.limits.block_size
        end = len(state.history)
        for group, serials in enumerate(state.serials):
            begin = self._first_seen(group, first)
            while begin < end:
                block, offset = self._cell(step, slot, group, begin)
                stop = min(end, begin - offset + size)
                if self._cells[block].serials[offset : offset + stop - begin] != serials[begin:stop]:
                    raise self._lost(step, slot, group, begin)
                begin = stop
        return state.history

    def _lost(self, step: int, slot: int, group: int, position: int) -> StepViolation:
        """Return the violation of a row that reads other tokens from `position` on."""
        state = self._slots[slot]
        block, offset = self._cell(step, slot, group, position)
        while self._cells[block].serials[offset] == state.serials[group][position]:
            position, offset = position + 1, offset + 1
        past = self._cells[block].pasts[offset]
        return self._violation(
            step,
            slot,
            f"lost position {position}: block {block} was written by another row "
            f"(token {state.history[position]} became {-1 if past is None else past[0]})",
        )

    def _sample(self, step: int, slot: int, first: int, output: StepOutput) -> None:
        """`first`: the position of the row's first query."""
        state = self._slot(step, slot)
        history = self._read(step, slot, first)
        params = state.start.params
        error = self.row_failure(history) if self.row_failure is not None else None
        if error is not None:
            output.errors[slot] = error
        token = self.oracle(history, state.start)
        banned = set(params.bad_words)
        if len(history) - state.start.num_prompt < params.min_new_tokens:
            banned.update((token_id,) for token_id in params.stop_token_ids)
        allowed = params.allowed_token_ids or range(self.limits.vocab_size)
        while (token,) in banned or token not in allowed:
            token = (token + 1) % self.limits.vocab_size
        if state.num_told != len(history):
            raise self._violation(step, slot, f"samples after {len(history)} tokens, and knows of {state.num_told}")
        state.num_told += 1
        state.last_token = token
        output.slots.append(slot)
        output.tokens.append(token)
        if self.forces is not None and error is None and self._least_forced:
            self._force(slot, [*history, token], output)
        if params.logprobs is not None:
            output.logprobs[slot] = self._logprobs(token, token, params.logprobs)

    def _force(self, slot: int, known: list[int], output: StepOutput) -> None:
        """Output the tokens forced after the known ones, up to the number that is useful."""
        assert self.forces is not None
        state, forced = self._slots[slot], list[int]()
        for _ in range(self.forces(known)):
            if self.row_failure is not None and self.row_failure([*known, *forced]) is not None:
                break
            forced.append(self.oracle([*known, *forced], state.start))
        if len(forced) >= self._least_forced:
            output.forced[slot] = forced

    def _compute(self, row: PrefillRow, history: list[int], output: StepOutput) -> None:
        """Write the result of a row that samples no token: an error, or the sum of fake hidden states that its
        `pooling` selects."""
        error = self.row_failure(history) if self.row_failure is not None else None
        if error is not None:
            output.errors[row.slot] = error
        if row.pooling is None:
            return
        first = row.position if row.pooling == "mean" else len(history) - 1
        hidden = hash_hidden(history, self.limits.hidden_size, first)
        sums = [sum(column) for column in zip(*hidden, strict=True)]
        output.pooled[row.slot] = sums[: len(self.limits.labels)] if row.pooling == "score" else sums

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
        """Return `chosen` first, then `best` and the ids after it, each half as likely as the one before."""
        ranked = [((best + rank) % self.limits.vocab_size, -0.6931471805599453 * (rank + 1)) for rank in range(count)]
        own = dict(ranked).get(chosen, -0.6931471805599453 if chosen == best else -20.0)
        return [(chosen, own), *ranked]

    def _cell(self, step: int, slot: int, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.limits.block_size)
        table = self._slot(step, slot).tables[group]
        block = table[index] if index < len(table) else None
        if block is None:
            raise self._violation(step, slot, f"has no block for position {position}: its table is {table}")
        return block, offset

    def _slot(self, step: int, slot: int) -> _Slot:
        if slot not in self._slots:
            raise self._violation(step, slot, "was never started")
        return self._slots[slot]

    def _violation(self, step: int, slot: int, what: str) -> StepViolation:
        return StepViolation(f"step {step}: slot {slot} {what}")
