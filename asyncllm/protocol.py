"""All that the engine and the model side say to each other: plain data, no torch.

The engine schedules *steps*. A step is a `Batch`; its result is a `StepOutput`. Steps run in the order in which
they were submitted, and the engine may submit step N+1 before it has read step N. Therefore a decode row carries
no token: its input is the last token sampled for its slot, which never leaves the device. A *slot* is a stable row
of the device's state tables (block table, last token, position, sampling state), owned by one sequence from
`SlotStart` until the scheduler hands the slot to another sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from asyncllm.errors import ModelError
from asyncllm.types import Pooled

__all__ = [
    "Batch",
    "Command",
    "Executor",
    "Grammar",
    "ImagePreparation",
    "ImageProcessor",
    "Limits",
    "LoadAdapter",
    "OtherRankRefused",
    "PrefillRow",
    "Progress",
    "PromptImage",
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
    "UnloadAdapter",
    "UpdateWeights",
    "VideoProcessor",
    "Wake",
]

TokenLogprobs = list[tuple[int, float]]
"""Log-probabilities at one position: the chosen token first, then the most likely ones in falling order."""


class Progress(Protocol):
    """How far one answer has come in its grammar. Used by one thread at a time."""

    error: str | None
    """Why the answer cannot go on."""

    @property
    def ended(self) -> bool:
        """Whether only the end may follow."""

    def consume(self, token: int) -> None:
        """Take note of the answer's next token."""

    def forced(self) -> list[int]:
        """Return the tokens that have to come next, where there is no choice; often none."""

    def fill(self, words: Any) -> None:
        """Write the bits of the tokens that may come next: an int32 array, 32 tokens each, the lowest bit first."""

    def fill_by(self, words: Any) -> Any:
        """Do as `fill`, or return the llguidance matcher that has to write the bits, in front of a call of `filled`."""

    def filled(self, words: Any) -> None:
        """Look at the bits that the matcher of `fill_by` has written."""


class Grammar(Protocol):
    """What one request's answers are held to."""

    def start(self, answer: Sequence[int]) -> Progress:
        """Return an answer's way through it, behind the tokens that it has already."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence is sampled, in token ids only. Written by `InputProcessor`, read by `agent.sampling`."""

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
    """Never sampled before `min_new_tokens` tokens are there, unless a grammar leaves nothing else. The scheduler does
    the stopping."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not be completed; a single id is banned outright."""
    grammar: Any = None
    """A `Grammar` that the answer is held to (`Limits.takes_grammars`)."""
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


_PIXELS_PER_TOKEN = 8 * 588
"""Towers of 0.3 to 0.7 G parameters stand before decoders of 7 to 8 G: eight patches of 14 x 14 pixels, which attend to
each other besides, are the work of one token."""


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a video of a prompt: what the model's tower is shown, and the tokens whose embeddings its features
    are."""

    position: int = 0
    """That of its first token, absolute."""
    length: int
    """Tokens, from its first to its last."""
    digest: bytes
    """Of all that the features depend on."""
    pixels: Any
    """A float32 numpy array, as the tower takes it."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, where these have positions in two dimensions; None: they follow one another."""
    shared: bool = False
    """All of its tokens have one position, but for the first and the last."""
    steps: int = 1
    """Grids that follow one another in time; a video has several, in a place each if it has `slots`."""
    interval: float = 1.0
    """Positions from one step to the next."""
    size: tuple[int, int] = (0, 0)
    """Height and width before preprocessing."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles that it is cut into, for towers that put these together."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the patches of each picture that the tower is shown of it, for towers that take any."""
    text: str = ""
    """What stands for it in a prompt's text, if not the family's placeholder."""
    slots: tuple[int, ...] = ()
    """Rows of features of each place that the text has; () for one place with a row for each token."""
    spans: tuple[tuple[int, int], ...] = ()
    """From which of its tokens to before which there are features, place by place; what is between them is text.
    Written where it gets its position; () for all."""
    apart: bool = False
    """The tower sees each place by itself, which has an equal part of the pixels."""
    joint: bool = False
    """The tokens of a place see each other, so that they are computed in one step."""

    @property
    def end(self) -> int:
        return self.position + self.length

    def joint_around(self, position: int) -> tuple[int, int] | None:
        """Return from where to where, absolute, tokens see each other of which one is before `position` and one is not;
        None: there are none."""
        if self.joint and self.position < position < self.end:
            for start, stop in self.spans or ((0, self.length),):
                if self.position + start < position < self.position + stop:
                    return self.position + start, self.position + stop
        return None

    @property
    def num_features(self) -> int:
        """Rows of features."""
        return sum(self.slots) or self.length

    def encodings(self) -> Iterator[tuple[int, int]]:
        """Yield from which position on what the tower sees at once is needed, and the work: about as many tokens of the
        prompt take as long to compute as that takes to encode."""
        work = int(getattr(self.pixels, "size", 0)) // _PIXELS_PER_TOKEN
        starts = [start for start, _ in self.spans] if self.apart else [0]
        for start in starts:
            yield self.position + start, work // len(starts)

    def seen_at(self, place: int) -> PromptImage:
        """Return what the tower sees for a place with this number."""
        if not self.apart:
            return self
        share = len(self.pixels) // len(self.slots)
        return msgspec.structs.replace(
            self,
            length=self.slots[place],
            digest=self.digest + place.to_bytes(4, "little"),
            pixels=self.pixels[place * share : (place + 1) * share],
            steps=1,
            slots=(self.slots[place],),
            spans=(),
        )

    @property
    def shift(self) -> int:
        """How far the tokens behind it are moved: with a grid it is as long as its longest side, or as its time; with a
        shared position as long as that, the first and the last."""
        if self.shared:
            return 3 - self.length
        if self.grid is None:
            return 0
        if self.slots:
            return len(self.slots) * (max(self.grid) - self.slots[0])
        return max(*self.grid, int((self.steps - 1) * self.interval) + 1) - self.length


class ImageProcessor(Protocol):
    """What a family makes of images before its tower sees them. Used by several threads at once."""

    placeholder: str
    """What stands for an image in a prompt's text. One of its tokens is `token_id`."""
    token_id: int
    """The token that an image's own take the place of."""
    before: Sequence[int]
    """Tokens that are put in front of those."""
    after: Sequence[int]
    joint: int
    """Most tokens of a place whose tokens see each other; 0: a chunk of a prompt may end in any image."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load an image and return what the tower is to be shown of it. Takes milliseconds to seconds.

        Raises InvalidMessage for what is no image, InvalidParameter for options that the family does not have.
        """


@runtime_checkable
class VideoProcessor(ImageProcessor, Protocol):
    """Of a family that takes videos too."""

    video_token_id: int
    """The token that a video's own take the place of."""

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load a video, a list of frames or a file, as `prepare` does an image, and return what the tower is to be
        shown of it."""


@runtime_checkable
class CuttingProcessor(ImageProcessor, Protocol):
    """Of a family that cuts images into tiles where a conversation has few of them."""

    most_cut: int
    """Images of a conversation whose images are cut."""


class ImagePreparation(Protocol):
    """An `ImageProcessor` that may remember what it has prepared. Used by several threads at once."""

    @property
    def processor(self) -> ImageProcessor: ...

    def prepare(
        self, image: Any, options: Mapping[str, Any], cache_salt: str | None = None, *, is_video: bool = False
    ) -> PromptImage:
        """Return what the processor's `prepare` does, or its `prepare_video`. Under unequal salts nothing is shared,
        and digests differ."""


class SlotStart(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes possession of a slot, at first admission or after preemption."""

    slot: int
    params: SamplingParams
    num_prompt: int
    """Tokens of the prompt; what follows in `token_ids` was generated before a preemption."""
    num_tokens: int
    """Tokens known to the host: prompt and, after a preemption, generated ones."""
    token_ids: list[int]
    """The known tokens when `params.needs_history`, else empty."""
    position_shift: int = 0
    """How far the positions of tokens behind all images are from their numbers (`PromptImage.shift`)."""
    adapter: int = 0
    """The number of the LoRA adapter that its tokens are computed with, and"""
    adapter_slot: int = -1
    """where on the device that has to lie from this step on; -1: without an adapter."""


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of known tokens to compute for one slot."""

    slot: int
    tokens: list[int]
    """At least one id."""
    position: int
    """Absolute position of `tokens[0]`; everything before it is in the slot's blocks already."""
    sample: bool
    """True when the chunk ends the known tokens: the next token is sampled from the last position."""
    prompt_logprobs: int | None = None
    """N >= 0: for each position of the chunk, the log-probability of the *following* known token, and the N most
    likely. The successor of the chunk's last token is `next_token`."""
    next_token: int | None = None
    """The known token after this chunk, if there is one and prompt_logprobs asks for it."""
    output_logits: bool = False
    """Return the raw float32 logits of every position of the chunk."""
    pooling: Pooled | None = None
    """Return the sum of hidden states after the final norm: of the whole chunk (mean), or its last token's own; or what
    the head says of the latter (score)."""
    images: Sequence[PromptImage] = ()
    """All of the prompt, in order, whether they reach into the chunk or not."""
    forced: Sequence[int] = ()
    """Where the chunk is sampled from, the last known tokens that no step drew: they were forced (`StepOutput.forced`),
    and the slot's sampling has not seen them."""

    @property
    def scored(self) -> bool:
        """Whether it asks for anything that comes from its tokens' logits, besides the next token."""
        return self.output_logits or self.prompt_logprobs is not None

    @property
    def reads_all(self) -> bool:
        """Whether it asks for something of every token's hidden state after the final norm."""
        return self.output_logits or self.prompt_logprobs is not None or self.pooling == "mean"


class SwapPlan(msgspec.Struct, kw_only=True):
    """Blocks that change between the device's pool and the host's. Order: all of `swap_out`, then all of `swap_in`.

    A device block may be a source of `swap_out` and then be written in the same step. Destinations are distinct.
    """

    swap_out: list[tuple[int, int]] = []
    """(device block, host block) to copy it to."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block) to copy it to."""

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in)


class Batch(msgspec.Struct, kw_only=True):
    """One step. Order of work: `starts`, `new_blocks`, `swaps`, `copies`, then the forward pass, then sampling."""

    step: int
    starts: list[SlotStart]
    new_blocks: list[tuple[int, int, int, list[int]]]
    """(slot, block group, index in its block table there, block ids to write from there on)."""
    copies: list[tuple[int, int]]
    """(source block, destination block): copy on write, before anything of this step is written."""
    decode: list[int]
    """Slots that advance by one token from their last sampled one, at their own position."""
    prefill: list[PrefillRow]
    swaps: SwapPlan = msgspec.field(default_factory=SwapPlan)
    last_read: int = -1
    """The newest step whose result was known when this one was scheduled; the others in flight it takes for done."""
    least_forced: int = 0
    """How many forced tokens (`StepOutput.forced`) have to follow one another to be of use. 0 means that they are not
    looked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(row.tokens) for row in self.prefill)


class StepOutput(msgspec.Struct, kw_only=True):
    """What one step gave. Sampled slots come in batch order: decode rows, then prefill rows with `sample`."""

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
    """Slot -> the sum that its row's `pooling` asks for [hidden], added in float32, or scores [labels]."""
    errors: dict[int, str] = {}
    """Slot -> why this row failed (a non-finite logit, say). The other rows are unharmed."""
    forced: dict[int, list[int]] = {}
    """Slot -> the tokens that have to follow its token, where they are several. Steps draw them one by one unless a
    prefill row brings them; those in flight draw the first of them in any case."""
    elapsed_ms: float = 0.0


class StepFailed(Exception):
    """A step raised, and the device goes on: its rows are lost, and no others. The cause is chained."""


class StepDropped(Exception):
    """A step was not run, because one that it was built on failed. Its rows can be computed again."""


class OtherRankRefused(ModelError):
    """A command was not carried out, because another rank could not; that one says why."""


ResidentPart = Literal["weights", "kv_cache"]
"""What of a model sleeps and wakes by itself. The KV cache comes with all that is made for steps, such as graphs."""


class UpdateWeights(msgspec.Struct, frozen=True):
    """Take these tensors for the model's weights, all of them or none."""

    weights: Mapping[str, Any]
    """Tensor by its name in a checkpoint. The caller leaves them alone until the command is carried out."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Give the device's memory back. KV is lost, on the device and in host memory."""

    level: int
    """1: weights go to host memory; 2: they are lost."""


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Take the memory of these parts again; what is there already stays."""

    parts: frozenset[ResidentPart]


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Read a LoRA adapter into host memory. Slots and blocks keep their content."""

    number: int
    """What `SlotStart.adapter` will name it by."""
    name: str
    path: str
    """Its folder."""


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Forget a LoRA adapter, which no sequence has or will have. Slots and blocks keep their content."""

    number: int


class TakeVocabulary(msgspec.Struct, tag=True, frozen=True):
    """Make ready for grammars (`TakesGrammars`), which reach an executor in other processes as texts."""

    ends: tuple[int, ...]
    """Tokens that end an answer."""


Command = UpdateWeights | Sleep | Wake | LoadAdapter | UnloadAdapter | TakeVocabulary
"""What is asked of a model as a whole, between two steps. No slot and no block keeps its content beyond new weights and
a sleep."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the model side found out at start: never written back into the configuration."""

    num_blocks: int
    """Blocks in the KV pool."""
    block_size: int
    """Tokens per block."""
    windows: tuple[int | None, ...] = (None,)
    """Of each block group, how many of the latest positions its layers see; None: all of them. A sequence has a block
    table in each; any block can be in any of them."""
    keeps_state: bool = False
    """Whether a block holds a state after the latest token in it, beside or in place of each token's keys and values:
    who goes on in the middle of a block must be the one who wrote it."""
    max_position: int
    """Positions that the model's rotary tables and training context allow, after scaling."""
    vocab_size: int
    """Rows of the output embedding: every valid token id is below it."""
    hidden_size: int
    """Entries of a hidden state."""
    takes_grammars: bool = False
    """Whether `SamplingParams.grammar` is honoured; by an executor in other processes, behind `TakeVocabulary`."""
    takes_images: bool = False
    """Whether the model has a vision tower, so that `PrefillRow.images` is honoured."""
    has_head: bool = True
    """Whether hidden states become logits; without, there are embeddings and no answers."""
    num_labels: int = 0
    """How many scores the model's head gives a sequence; 0: it has no such head."""
    num_slots: int
    """Rows of the state tables: at least `max_batch_size`, more when rows in flight need a grace period."""
    num_host_blocks: int = 0
    """Blocks in host memory, of the same size, to copy to and from."""
    num_adapter_slots: int = 0
    """Adapters that steps may use at a time."""
    min_copied_tokens: int = 1
    """A cached beginning on the host that is shorter is computed again, as that is faster than to copy it."""
    max_steps_in_flight: int = 2
    """Steps to submit before the oldest is read, when no sequence waits to be admitted."""
    token_tile: int = 1
    """Steps with many tokens are fastest when their number is a multiple of this."""
    tokens_beside_decode: int | None = None
    """Most tokens of a step that decodes streamed answers, if there is room for prompts then; None: no such bound."""
    dynamic_rope_from: int | None = None
    """Dynamic NTK: prompts longer than this have a rotary base of their own. None: no such scaling."""
    device: str = "cpu"
    dtype: str = "float32"
    architecture: str = ""
    num_parameters: int = 0
    model_path: str = ""
    start_seconds: dict[str, float] = {}
    """How long each phase of the start took, in order (`StartTimes`)."""


class StartTimes:
    """A clock of the phases of a start, which follow one another: import, device, load, pool, capture."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End `phase`, which began where the one before ended."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Executor(Protocol):
    """Runs steps somewhere else than on the event loop, or asynchronously on it."""

    @property
    def isolated(self) -> bool:
        """Whether another process has the device, so that a device that is lost is lost with that process alone."""

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """Call `on_step` in the event loop as soon as the future of a step is done: in the same turn of the loop, as a
        callback of the future would come a turn later.

        Call `on_death` if the executor dies while nothing that it was asked for can raise.
        """

    async def start(self) -> Limits:
        """Load the model, size the KV pool. Raises ModelError; leaves nothing behind when it raises."""

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue a step and return at once with a future of the running loop. Steps run in order.

        The future raises StepFailed when the step failed as a whole and the device goes on. Steps that were scheduled
        before that was known are built on it, and raise StepDropped. After any other error the executor is dead: every
        later step raises too.
        """

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        """Carry out a command while no step is in flight; none is submitted before the future is done. When it raises
        an AsyncLLMError, everything is as it was; after any other error every later call fails, as after a step's."""

    async def close(self) -> None:
        """Finish what runs, drop what waits, release threads and memory. Idempotent; from any state."""


@runtime_checkable
class TakesGrammars(Protocol):
    """An executor in other processes, which have to make grammars for themselves."""

    def take_grammar(self, grammar: Any) -> asyncio.Future[None]:
        """Make ready for steps whose rows are held to a `CompiledGrammar`, whatever runs meanwhile. None of them is
        submitted before the future is done."""
