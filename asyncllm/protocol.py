"""The messages between the engine and the model side: plain data, no torch.

The engine schedules *steps*. A step is a `Batch`; its result is a `StepOutput`. Steps run in the order in which
they were submitted, and the engine may submit step N+1 before it has read step N. Therefore a decode row carries
no token: its input is the last token sampled for its slot, which never leaves the device. A *slot* is a stable row
of the device's state tables (block table, last token, position, sampling state), owned by one sequence from
`SlotStart` until the scheduler hands the slot to another sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from asyncllm.errors import ModelError
from asyncllm.prompt_image import PromptImage
from asyncllm.types import Pooled

__all__ = [
    "Batch",
    "Command",
    "Executor",
    "Grammar",
    "Limits",
    "LoadAdapter",
    "OtherRankRefused",
    "PrefillRow",
    "Progress",
    "ResidentPart",
    "SamplingParams",
    "Sleep",
    "SlotStart",
    "StartTimes",
    "StepDropped",
    "StepFailed",
    "StepOutput",
    "SwapPlan",
    "TakeVocabulary",
    "TakesGrammars",
    "TokenLogprobs",
    "UpdateWeights",
    "Wake",
]

TokenLogprobs = list[tuple[int, float]]
"""Log-probabilities at one position: the chosen token first, then the most likely ones in falling order."""


class Progress(Protocol):
    """The progress of one answer in its grammar. Used by one thread at a time."""

    error: str | None
    """Why the answer cannot continue."""

    @property
    def ended(self) -> bool:
        """Whether only the end of the answer may follow."""

    def consume(self, token: int) -> None:
        """Advance by the answer's next token."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty if there is a choice."""

    def fill(self, words: Any) -> None:
        """Write the bits of the tokens that may come next into an int32 array, 32 tokens per word, lowest bit first."""

    def begin_fill(self, words: Any) -> Any:
        """Fill like `fill`, or return the llguidance matcher that has to write the bits before `finish_fill`."""

    def finish_fill(self, words: Any) -> None:
        """Read the bits that the matcher of `begin_fill` has written."""


class Grammar(Protocol):
    """The grammar of one request's answers."""

    def start(self, answer: Sequence[int]) -> Progress:
        """Return the progress of an answer that already has these tokens."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence is sampled, in terms of token ids. Written by `InputProcessor`, read by `agent.sampling`."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means no limit; 1 means greedy."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the prompt or the answer (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """64-bit key of the counter-based generator; the counter is the absolute position of the sampled token."""
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Never sampled among the first `min_new_tokens` tokens, unless a grammar leaves nothing else. The scheduler does
    the stopping."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned where it would complete them; a single id is always banned."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: any token."""
    grammar: Any = None
    """The `Grammar` of the answer, if any (`Limits.takes_grammars`)."""
    logprobs: int | None = None
    """None: none. N >= 0: the chosen token's log-probability and those of the N most likely tokens."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether sampling reads the tokens seen so far."""
        return bool(
            self.bad_words
            or self.grammar is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SlotStart(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence gets a slot, at its first admission or after a preemption."""

    slot: int
    params: SamplingParams
    num_prompt: int
    """Number of prompt tokens; further `token_ids` were generated before a preemption."""
    num_tokens: int
    """Number of tokens known to the host: the prompt's and, after a preemption, generated ones."""
    token_ids: list[int]
    """The known tokens if `params.needs_history`, otherwise empty."""
    position_shift: int = 0
    """Offset of the positions after all images from the token indices (`PromptImage.shift`)."""
    adapter: int = 0
    """Number of the LoRA adapter of its tokens; 0: none."""
    adapter_slot: int = -1
    """The adapter's slot on the device from this step on; -1: none."""


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of known tokens to compute for one slot."""

    slot: int
    tokens: list[int]
    """At least one id."""
    position: int
    """Absolute position of `tokens[0]`; all earlier tokens are already in the slot's blocks."""
    sample: bool
    """Whether the chunk ends the known tokens, so that the next token is sampled at its last position."""
    prompt_logprobs: int | None = None
    """N >= 0: for each position of the chunk, the log-probability of the *following* known token, and of the N most
    likely ones. The token after the chunk's last one is `next_token`."""
    next_token: int | None = None
    """The known token after this chunk, if there is one and prompt_logprobs needs it."""
    output_logits: bool = False
    """Return the raw float32 logits of every position of the chunk."""
    pooling: Pooled | None = None
    """Return the sum of the chunk's hidden states after the final norm (mean), the last token's hidden state (last), or
    the model's scores for it (score)."""
    images: Sequence[PromptImage] = ()
    """All images of the prompt, in order, including those outside the chunk."""
    forced: Sequence[int] = ()
    """With `sample`, the last known tokens that were forced rather than drawn (`StepOutput.forced`). The slot's
    sampling state has not seen them."""

    @property
    def scored(self) -> bool:
        """Whether the row needs its tokens' logits for more than the next token."""
        return self.output_logits or self.prompt_logprobs is not None

    @property
    def reads_all(self) -> bool:
        """Whether the row needs every token's hidden state after the final norm."""
        return self.output_logits or self.prompt_logprobs is not None or self.pooling == "mean"


class SwapPlan(msgspec.Struct, kw_only=True):
    """Blocks to copy between the device's pool and the host's: first all of `swap_out`, then all of `swap_in`.

    A device block may be a source of `swap_out` and then be written in the same step. Destinations are distinct.
    """

    swap_out: list[tuple[int, int]] = []
    """(device block, host block): copied from the first to the second."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block): copied from the first to the second."""

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in)


class Batch(msgspec.Struct, kw_only=True):
    """One step. Order of work: `starts`, `new_blocks`, `swaps`, `copies`, then the forward pass, then sampling."""

    step: int
    starts: list[SlotStart]
    new_blocks: list[tuple[int, int, int, list[int]]]
    """(slot, block group, index in the slot's block table, block ids to write from there on)."""
    copies: list[tuple[int, int]]
    """(source block, destination block): copied on write, before the step writes anything."""
    decode: list[int]
    """Slots that advance by one token from their last sampled one, at their own position."""
    prefill: list[PrefillRow]
    swaps: SwapPlan = msgspec.field(default_factory=SwapPlan)
    last_read: int = -1
    """The newest step whose result was known when this one was scheduled; the others in flight it takes for done."""
    min_forced: int = 0
    """Minimum number of consecutive forced tokens (`StepOutput.forced`) that are used; 0: they are not computed."""

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(row.tokens) for row in self.prefill)


class StepOutput(msgspec.Struct, kw_only=True):
    """The result of a step. Sampled slots come in batch order: decode rows, then prefill rows with `sample`."""

    step: int
    slots: list[int]
    tokens: list[int]
    """One id per entry of `slots`; meaningless for a slot named in `errors`."""
    logprobs: dict[int, TokenLogprobs] = {}
    """Slot -> log-probabilities, for slots whose parameters ask for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Slot -> one entry per position of its chunk that has a known successor."""
    logits: dict[int, Any] = {}
    """Slot -> float32 CPU tensor [chunk, vocab]."""
    pooled: dict[int, Sequence[float]] = {}
    """Slot -> the sum of its row's `pooling` [hidden], added in float32, or scores [labels]."""
    errors: dict[int, str] = {}
    """Slot -> why this row failed, such as a non-finite logit. The other rows are unharmed."""
    forced: dict[int, list[int]] = {}
    """Slot -> the tokens that have to follow its token, if there are several. Steps draw them one by one unless a
    prefill row brings them; steps in flight draw the first of them in any case."""
    elapsed_ms: float = 0.0


class StepFailed(Exception):
    """A step raised, and the device survived: only the rows of this step are lost. The cause is chained."""


class StepDropped(Exception):
    """A step was not run, because a step that it builds on failed. Its rows can be computed again."""


class OtherRankRefused(ModelError):
    """A command was not carried out, because another rank failed. That rank's error says why."""


ResidentPart = Literal["weights", "kv_cache"]
"""The parts of a model that sleep and wake separately. The KV cache includes everything that steps need, such as
graphs."""


class UpdateWeights(msgspec.Struct, frozen=True):
    """Replace weights of the model by these tensors, all of them or none."""

    weights: Mapping[str, Any]
    """Name in a checkpoint -> tensor. The caller must not change them until the command is done."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Free the device's memory. KV blocks are lost, on the device and in host memory."""

    level: int
    """1: weights go to host memory; 2: they are lost."""


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Bring these parts back to the device; parts that are already there stay."""

    parts: frozenset[ResidentPart]


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Read a LoRA adapter into host memory, while steps run."""

    number: int
    """Its number in `SlotStart.adapter`."""
    name: str
    path: str
    """Its folder."""
    digest: str = ""
    """Digest of its files when they were read before; they must not have changed."""


class TakeVocabulary(msgspec.Struct, tag=True, frozen=True):
    """Prepare for grammars (`TakesGrammars`), which are sent to an executor in other processes as text."""

    ends: tuple[int, ...]
    """Tokens that end an answer."""


Command = UpdateWeights | Sleep | Wake | TakeVocabulary
"""An operation on the whole model between two steps. After new weights or a sleep, no slot or block keeps its
content."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the loaded model and its device. They are never written back into the configuration."""

    num_blocks: int
    """Blocks in the KV pool."""
    block_size: int
    """Tokens per block."""
    windows: tuple[int | None, ...] = (None,)
    """For each block group, how many of the latest positions its layers see; None: all of them. A sequence has a block
    table in each group; any block can be used in any group."""
    keeps_state: bool = False
    """Whether a block holds the state after its latest token, with or instead of keys and values. Then only the
    sequence that wrote a partial block can continue it."""
    max_position: int
    """Maximum number of positions that the model's rotary tables and training context allow, after scaling."""
    vocab_size: int
    """Rows of the output embedding; every valid token id is smaller."""
    hidden_size: int
    """Size of a hidden state."""
    takes_grammars: bool = False
    """Whether `SamplingParams.grammar` is honoured; by an executor in other processes only after `TakeVocabulary`."""
    takes_images: bool = False
    """Whether the model has a vision tower, so that `PrefillRow.images` is honoured."""
    takes_embeddings: bool = False
    """Whether `PrefillRow.images` may hold embeddings from the caller (`PromptImage.given`)."""
    has_head: bool = True
    """Whether the model has an output embedding. Without one it computes embeddings but no answers."""
    labels: tuple[str, ...] = ()
    """Names of the scores that the model's head computes for a sequence, in order; empty: it has no such head."""
    num_slots: int
    """Number of slots: at least `max_batch_size`, and more to replace those held by steps in flight."""
    num_host_blocks: int = 0
    """Blocks of the same size in host memory, for swapping."""
    num_adapter_slots: int = 0
    """Maximum number of adapters that steps may use at a time."""
    num_host_adapters: int = 0
    """Maximum number of adapters in host memory. Of the adapters given at start, the first ones are there."""
    adapter_digests: tuple[str, ...] = ()
    """Digests of the files of the adapters given at start, in order."""
    min_copied_tokens: int = 1
    """Minimum number of cached tokens in host memory worth copying; recomputing fewer is faster."""
    max_steps_in_flight: int = 2
    """Maximum number of steps in flight while no sequence waits for admission."""
    token_tile: int = 1
    """Steps with many tokens run fastest at a multiple of this number of tokens."""
    tokens_beside_decode: int | None = None
    """Maximum number of tokens in a step that decodes streamed answers, if it has space for prompts; None: no limit."""
    dynamic_rope_from: int | None = None
    """Dynamic NTK: prompts longer than this have their own rotary base. None: no such scaling."""
    device: str = "cpu"
    dtype: str = "float32"
    architecture: str = ""
    num_parameters: int = 0
    model_path: str = ""
    start_seconds: dict[str, float] = {}
    """Duration of each phase of the start, in order (`StartTimes`)."""


class StartTimes:
    """A clock for the phases of a start, in order: import, device, load, pool, capture."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End `phase`, which began at the end of the previous one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Executor(Protocol):
    """Runs steps in a thread, in other processes, or asynchronously on the event loop."""

    @property
    def isolated(self) -> bool:
        """Whether another process owns the device, so that a lost device is lost only with that process."""

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """Call `on_step` in the event loop as soon as the future of a step is done, in the same iteration; a callback
        of the future would run one iteration later.

        Call `on_death` if the executor dies while no open step or command could raise the error.
        """

    async def start(self) -> Limits:
        """Load the model and allocate the KV pool. On ModelError, leave nothing behind."""

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue a step and return a future of the running loop at once. Steps run in order.

        The future raises StepFailed if the whole step failed and the device survived. Steps that were scheduled before
        this was known build on it, and raise StepDropped. After any other error the executor is dead: every later step
        raises too.
        """

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        """Carry out a command while no step is in flight; no step is submitted before the future is done. If it raises
        an AsyncLLMError, nothing has changed; after any other error every later call fails, as after a step's."""

    def load_adapter(self, adapter: LoadAdapter) -> asyncio.Future[str]:
        """Read an adapter into host memory while steps run, and return the digest of its files. No step that names it
        is submitted before that.

        The future raises an AsyncLLMError if the adapter cannot be read, and then nothing has changed. The caller
        ensures that there are no more than `Limits.num_host_adapters`.
        """

    def drop_adapter(self, number: int) -> None:
        """Free the host memory of an adapter. All steps that name it have been read."""

    async def close(self) -> None:
        """Finish running steps, drop waiting ones, release threads and memory. Idempotent; from any state."""


@runtime_checkable
class TakesGrammars(Protocol):
    """An executor in other processes, each of which compiles grammars itself."""

    def take_grammar(self, grammar: Any) -> asyncio.Future[None]:
        """Prepare for steps with rows of a `CompiledGrammar`, while other steps run. No such step is submitted before
        the future is done."""
