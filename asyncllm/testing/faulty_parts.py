"""Wrappers of an engine's parts that inject a FaultPlan's faults. Each acts as the real part, after `plan.reach`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

from asyncllm.agent.executor import Agent, LaunchedStep
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.engine.schedule.waiting_queue import WaitingQueue
from asyncllm.protocol import Batch, Command, Limits, LoadAdapter, StepOutput
from asyncllm.testing.faults import Faults, InjectedFault
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, FinishReason

__all__ = ["FaultyScheduler", "FaultyTokenizer", "faulty_agent", "faulty_template"]

NO_TOKEN = 2**31 - 1
"""An id outside every vocabulary."""


class FaultyTokenizer(Tokenizer):
    """Faults at "tokenize"."""

    def __init__(self, inner: Tokenizer, plan: Faults) -> None:
        super().__init__(inner.model, bos_token_id=inner.bos_token_id, eos_token_ids=inner.eos_token_ids)
        self._plan = plan

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_special_tokens: bool = True,
        *,
        parse_special: bool = True,
        literal_spans: Items[tuple[int, int]] = (),
    ) -> list[int]:
        corrupted = self._plan.reach("tokenize", [text])
        ids = super().encode(
            text, add_bos, add_special_tokens, parse_special=parse_special, literal_spans=literal_spans
        )
        return ids if corrupted is None else [*ids, NO_TOKEN]


class _FaultyRenderer:
    """Faults at "template"."""

    def __init__(self, inner: Any, plan: Faults) -> None:
        self._inner = inner
        self._plan = plan
        self.variables: frozenset[str] = inner.variables
        self.source: str | None = inner.source
        self.reads_tools: bool = inner.reads_tools

    def render(self, messages: list[dict[str, Any]], ending: Any, variables: Mapping[str, Any]) -> str:
        self._plan.reach("template", [str(messages)])
        text: str = self._inner.render(messages, ending, variables)
        return text

    def later_turn(self, prompt: str) -> str:
        self._plan.reach("template", [prompt])
        text: str = self._inner.later_turn(prompt)
        return text


def faulty_template(inner: ChatTemplate, plan: Faults) -> ChatTemplate:
    """Return a chat template with faults at "template"."""
    renderer = _FaultyRenderer(inner.renderer, plan)
    return ChatTemplate(inner.name, renderer, capability=inner.capability, stop_words=inner.stop_words)


class FaultyScheduler(Scheduler):
    """Injects faults at the points of the event loop, by wrapping the queue, the blocks and each request's delivery and
    answers."""

    def __init__(
        self,
        plan: Faults,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        waiting: WaitingQueue | None = None,
        **settings: Any,
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._admitted: dict[Sequence, None] = {}
        """Sequences that have or had a row, until they finish."""
        queue: Any = _FaultyQueue(waiting or WaitingQueue(), plan, self._admitted)
        super().__init__(limits, waiting=queue, **settings)
        self.blocks: BlockManager = _FaultyBlocks(self.blocks, plan)  # type: ignore[assignment]
        self.admission.blocks = self.blocks

    def add(self, request: Request) -> None:
        prompt = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        request.delivery = _FaultyDelivery(request.delivery, self._plan, prompt)  # type: ignore[assignment]
        for sequence in request.sequences:
            sequence.answer = _FaultyAnswer(sequence.answer, self._plan, prompt)  # type: ignore[assignment]
        super().add(request)

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        if batch is not None:
            self._plan.rows[batch.step] = {row.slot: _prompt_of(row) for row in self._admitted if row.slot >= 0}
        return batch

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        super().finish(sequence, reason)
        self._admitted.pop(sequence, None)

    def clear(self) -> None:
        super().clear()
        self._admitted.clear()


def _prompt_of(sequence: Sequence) -> str:
    """Return the prompt of an added sequence. A map of prompts would keep finished requests alive."""
    prompt: str = sequence.answer.prompt  # type: ignore[attr-defined]
    return prompt


class _Front:
    """Wraps a part, and delegates everything it does not define."""

    def __init__(self, inner: Any, plan: Faults) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FaultyQueue(_Front):
    """Faults at "admit"."""

    _inner: WaitingQueue

    def __init__(self, inner: WaitingQueue, plan: Faults, admitted: dict[Sequence, None]) -> None:
        super().__init__(inner, plan)
        self._admitted = admitted

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._inner)

    def admit(self, sequence: Sequence, num_to_compute: int) -> None:
        self._plan.reach("admit", [_prompt_of(sequence)])
        self._inner.admit(sequence, num_to_compute)
        self._admitted[sequence] = None


class _FaultyBlocks(_Front):
    """Faults at "alloc" and "free"."""

    _inner: BlockManager

    def allocate(self, count: int) -> list[int]:
        self._plan.reach("alloc")
        return self._inner.allocate(count)

    def retire(self, blocks: list[int], last_step: int, last_read: int) -> None:
        self._plan.reach("free")
        self._inner.retire(blocks, last_step, last_read)


class _OfRequest(_Front):
    """Wraps a part of a request. `prompt`: the request's prompt."""

    def __init__(self, inner: Any, plan: Faults, prompt: str) -> None:
        super().__init__(inner, plan)
        self.prompt = prompt


class _FaultyDelivery(_OfRequest):
    """Faults at "emit"."""

    _inner: Delivery

    def put(self, chunk: Chunk) -> bool:
        self._plan.reach("emit", [self.prompt])
        return self._inner.put(chunk)


class _FaultyAnswer(_OfRequest):
    """Faults at "detokenize"."""

    _inner: Answer

    def read(self, tokens: Items[int], *, last: bool) -> None:
        self._plan.reach("detokenize", [self.prompt])
        self._inner.read(tokens, last=last)


class _StepFaults:
    """The faults of one step: "swap", "prefill" and "decode" before it, "sample" after it."""

    def __init__(self, plan: Faults, batch: Batch) -> None:
        self._plan = plan
        prompts = plan.rows.get(batch.step, {})
        for step in [step for step in list(plan.rows) if step <= batch.step]:
            del plan.rows[step]
        self._prompts = prompts
        self._spoilt: set[int] = set()
        """Slots whose numbers are not finite."""
        if batch.swaps:
            self._reach("swap", list(prompts))
        if batch.prefill:
            self._reach("prefill", [row.slot for row in batch.prefill])
        if batch.decode:
            self._reach("decode", batch.decode)

    def _reach(self, point: Any, slots: Items[int]) -> int | None:
        index = self._plan.reach(point, [self._prompts.get(slot, "") for slot in slots])
        if index is not None and point != "sample":
            self._spoilt.add(slots[index])
        return index

    def after(self, output: StepOutput) -> StepOutput:
        """Apply the faults to a step's output and return it. Raises the errors planned at "sample"."""
        output.errors |= dict.fromkeys(self._spoilt, "a planned fault made its logits not finite")
        if output.slots:
            index = self._reach("sample", output.slots)
            if index is not None:
                output.tokens[index] = NO_TOKEN
        return output


class _FaultyStep:
    """A LaunchedStep that injects faults into its results."""

    def __init__(self, inner: LaunchedStep, faults: _StepFaults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def launched(self) -> bool:
        return self._inner.launched

    def wait(self) -> None:
        self._inner.wait()

    def output(self) -> StepOutput:
        return self._faults.after(self._inner.output())


class _FaultyAgent:
    """An agent that injects the faults of steps."""

    def __init__(self, inner: Agent, plan: Faults) -> None:
        self._inner = inner
        self._plan = plan
        self._unfinished: _FaultyStep | None = None

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    @property
    def runs_ahead(self) -> bool:
        return self._inner.runs_ahead

    @property
    def blocked(self) -> bool:
        return self._inner.blocked

    def launch(self, batch: Batch) -> LaunchedStep:
        faults = _StepFaults(self._plan, batch)
        step = _FaultyStep(self._inner.launch(batch), faults)
        if not step.launched:
            self._unfinished = step
        return step

    def resume(self) -> LaunchedStep | None:
        if self._inner.resume() is None:
            return None
        step, self._unfinished = self._unfinished, None
        return step

    def carry_out(self, command: Command) -> None:
        self._inner.carry_out(command)

    def load_adapter(self, adapter: LoadAdapter) -> str:
        return self._inner.load_adapter(adapter)

    def drop_adapter(self, number: int) -> None:
        self._inner.drop_adapter(number)

    def survives(self, error: BaseException) -> bool:
        return isinstance(error, InjectedFault) or self._inner.survives(error)


def faulty_agent(inner: Agent, plan: Faults) -> Agent:
    """Return an agent with faults at "swap", "prefill", "decode" and "sample"."""
    return _FaultyAgent(inner, plan)
