"""The parts of an engine in front of which a FaultPlan stands. Each does what the real one does, after `plan.reach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from asyncllm.agent.contained_runner import BatchRunner
from asyncllm.agent.executor import Agent
from asyncllm.agent.stream_executor import LaunchedStep, StepLauncher
from asyncllm.batch import Batch, Command, Limits, StepOutput
from asyncllm.engine.block_manager import BlockManager
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.sequence import Request
from asyncllm.testing.fault_plan import FaultPlan, InjectedFault
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk

__all__ = ["FaultyScheduler", "FaultyTokenizer", "faulty_agent", "faulty_template"]

NO_TOKEN = 2**31 - 1
"""An id that is in no vocabulary."""


class FaultyTokenizer(Tokenizer):
    """Faults at "tokenize"."""

    def __init__(self, inner: Tokenizer, plan: FaultPlan) -> None:
        super().__init__(inner._model, bos_token_id=inner.bos_token_id, eos_token_ids=inner.eos_token_ids)
        self._plan = plan

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = True,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        corrupted = self._plan.reach("tokenize", [text])
        ids = super().encode(text, add_bos=add_bos, parse_special=parse_special, literal_spans=literal_spans)
        return ids if corrupted is None else [*ids, NO_TOKEN]


class _FaultyRenderer:
    """Faults at "template"."""

    def __init__(self, inner: Any, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def render(self, messages: list[dict[str, Any]], ending: Any, variables: Mapping[str, Any]) -> str:
        self._plan.reach("template", [str(messages)])
        text: str = self._inner.render(messages, ending, variables)
        return text

    def later_turn(self, prompt: str) -> str:
        self._plan.reach("template", [prompt])
        text: str = self._inner.later_turn(prompt)
        return text


def faulty_template(inner: ChatTemplate, plan: FaultPlan) -> ChatTemplate:
    """A chat template with faults at "template"."""
    template = copy(inner)
    template._renderer = _FaultyRenderer(inner._renderer, plan)
    return template


class FaultyScheduler(Scheduler):
    """Faults at "admit", and by the parts that it puts into requests and in front of its blocks at the others of the
    event loop."""

    def __init__(self, plan: FaultPlan, tokenizer: Tokenizer, limits: Limits, **settings: Any) -> None:
        super().__init__(limits, **settings)
        self._plan = plan
        self._tokenizer = tokenizer
        self.blocks: BlockManager = _FaultyBlocks(self.blocks, plan)  # type: ignore[assignment]

    def add(self, request: Request) -> None:
        prompt = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        request.delivery = _FaultyDelivery(request.delivery, self._plan, prompt)  # type: ignore[assignment]
        for sequence in request.sequences:
            answer = sequence.answer
            answer._detokenizer = _FaultyDetokenizer(answer._detokenizer, self._plan, prompt)  # type: ignore[assignment]
        super().add(request)

    def schedule(self) -> Batch | None:
        batch = super().schedule()
        if batch is not None:
            self._plan.rows[batch.step] = {row.slot: _prompt_of(row.request) for row in self._running}
        return batch

    def _admit(self, batch: Batch) -> bool:
        sequence = self.waiting.first()
        if sequence is not None:
            self._plan.reach("admit", [_prompt_of(sequence.request)])
        return super()._admit(batch)


def _prompt_of(request: Request) -> str:
    prompt: str = request.delivery._prompt  # type: ignore[attr-defined]
    return prompt


class _Front:
    """Stands in front of a part, and hands on what it does not do itself."""

    def __init__(self, inner: Any, plan: FaultPlan, prompt: str = "") -> None:
        self._inner = inner
        self._plan = plan
        self._prompt = prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FaultyBlocks(_Front):
    """Faults at "alloc" and "free"."""

    _inner: BlockManager

    def allocate(self, count: int) -> list[int]:
        self._plan.reach("alloc")
        return self._inner.allocate(count)

    def retire(self, blocks: list[int], last_step: int, last_read: int) -> None:
        self._plan.reach("free")
        self._inner.retire(blocks, last_step, last_read)


class _FaultyDelivery(_Front):
    """Faults at "emit"."""

    _inner: Delivery

    def put(self, chunk: Chunk) -> None:
        self._plan.reach("emit", [self._prompt])
        self._inner.put(chunk)


class _FaultyDetokenizer(_Front):
    """Faults at "detokenize"."""

    _inner: Detokenizer

    def push(self, ids: Sequence[int]) -> str:
        self._plan.reach("detokenize", [self._prompt])
        return self._inner.push(ids)


class _StepFaults:
    """The faults of one step: "swap", "prefill" and "decode" ahead of it, "sample" behind it."""

    def __init__(self, plan: FaultPlan, batch: Batch) -> None:
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

    def _reach(self, point: Any, slots: Sequence[int]) -> int | None:
        index = self._plan.reach(point, [self._prompts.get(slot, "") for slot in slots])
        if index is not None and point != "sample":
            self._spoilt.add(slots[index])
        return index

    def after(self, output: StepOutput) -> StepOutput:
        """What the step gives with these faults. Raises what is planned at "sample"."""
        output.errors |= dict.fromkeys(self._spoilt, "its logits are not finite, as it was planned")
        if output.slots:
            index = self._reach("sample", output.slots)
            if index is not None:
                output.tokens[index] = NO_TOKEN
        return output


class _FaultyRunner(_Front):
    """A BatchRunner with the faults of steps."""

    _inner: BatchRunner
    limits: Limits

    def step(self, batch: Batch) -> StepOutput:
        faults = _StepFaults(self._plan, batch)
        return faults.after(self._inner.step(batch))


class _FaultyStep:
    """A LaunchedStep with the faults of its results."""

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


class _FaultyLauncher:
    """A StepLauncher with the faults of steps."""

    def __init__(self, inner: StepLauncher, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._unfinished: _FaultyStep | None = None

    @property
    def limits(self) -> Limits:
        return self._inner.limits

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

    def survives(self, error: BaseException) -> bool:
        return isinstance(error, InjectedFault) or self._inner.survives(error)


def faulty_agent(inner: Agent, plan: FaultPlan) -> Agent:
    """An agent with faults at "swap", "prefill", "decode" and "sample"."""
    return _FaultyLauncher(inner, plan) if isinstance(inner, StepLauncher) else _FaultyRunner(inner, plan)
