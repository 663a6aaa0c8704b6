"""Warm-up before the first request: measures the memory of steps, and compiles every kernel that a step may need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncllm import kernels
from asyncllm.agent.device.graphs import StepGraphs
from asyncllm.layers.layer import Layer
from asyncllm.layers.lora import group_adapters
from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart

__all__ = [
    "CapturedPart",
    "largest_step",
    "measure_reserve",
    "mlp_sizes",
    "prompt_lengths",
    "warm_up_batches",
    "warm_up_mlps",
]

SAFETY_BYTES = 256 * 2**20
"""Bytes left free beyond the measured ones, for later library workspaces and fragmentation."""


def largest_step(
    num_decode: int,
    prefill_lens: Sequence[int],
    block_size: int,
    num_blocks: int,
    *,
    caches: Sequence[Any],
    columns: Sequence[Column],
    batch_invariant: bool = False,
    adapted: bool = False,
    device: torch.device,
) -> StepInputs:
    """Return a step of `num_decode` decode rows followed by prompts of `prefill_lens` tokens, over a pool of few
    blocks.

    Rows share blocks and overwrite each other, because only time and memory matter.
    """
    lens = torch.tensor([1] * num_decode + list(prefill_lens), dtype=torch.int32, device=device)
    ends = lens.cumsum(0, dtype=torch.int32)
    num_tokens, longest = num_decode + sum(prefill_lens), max(prefill_lens)
    return StepInputs(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.arange(num_tokens, device=device) - (ends - lens).repeat_interleave(lens),
        places=torch.arange(num_tokens, device=device) % (num_blocks * block_size),
        num_decode=num_decode,
        q_offsets=torch.cat([ends.new_zeros(1), ends]),
        kv_lens=lens,
        block_tables=torch.zeros(len(lens), -(-longest // block_size) + 1, dtype=torch.int32, device=device),
        max_q_len=longest,
        prompts=[(count, count) for count in prefill_lens],
        caches=caches,
        more={
            column: torch.full(
                (num_tokens if column.per == "token" else len(lens),), column.padding, dtype=column.dtype, device=device
            )
            for column in columns
        },
        adapted=adapted,
        batch_invariant=batch_invariant,
    )


def prompt_lengths(num_tokens: int, longest: int) -> list[int]:
    """Return the lengths of the fewest prompts, each of at most `longest` tokens, that have `num_tokens` tokens in
    all."""
    full, rest = divmod(num_tokens, longest)
    return [longest] * full + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """A part of a step that has fixed sizes."""

    name: str
    launch: Callable[[Any], None]
    """Launches the part at a size."""
    sizes: Sequence[Any]
    """From small to large."""
    prepare: Callable[[Any], None] | None = None
    """Called with a size before `launch` may be called at all."""
    replayed: bool = True
    """Whether steps replay the part. Parts that few steps have are launched kernel by kernel, while the preceding part
    runs."""

    def make_ready(self, graphs: StepGraphs) -> None:
        """Capture all sizes, or compile their kernels."""
        if self.replayed:
            self.capture(graphs, self.sizes)
        else:
            for size in self.sizes:
                self.launch(size)

    def capture(self, graphs: StepGraphs, sizes: Sequence[Any]) -> None:
        """Capture some of the sizes, largest first: the others fit in its memory."""
        for size in reversed(sizes):
            if self.prepare is not None:
                self.prepare(size)
            graphs.capture(self.name, size, self.launch)


@torch.inference_mode()
def measure_reserve(
    model: DecoderLM,
    step: StepInputs,
    parts: Sequence[CapturedPart],
    stream: torch.cuda.Stream,
) -> int:
    """Return the bytes that `step`, the largest possible one, and the graphs of `parts` will take.

    A step's intermediates are measured at their peak. Graphs share the memory of their intermediates, which is as large
    as the largest graph's; each also takes some of its own, measured on the smallest graph of a part.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_rows = len(step.kv_lens)
    rows = torch.arange(num_rows, device="cuda")
    model.rank_logits(kernels.gather_rows(model(step), rows))
    stream.synchronize()
    step_bytes = torch.cuda.max_memory_allocated() - before

    graphs = StepGraphs(stream)
    free = _free_bytes()
    for part in parts:
        part.capture(graphs, part.sizes[-1:])
    graph_bytes = free - _free_bytes()
    for part in parts:
        free = _free_bytes()
        part.capture(graphs, part.sizes[:1])
        graph_bytes += (free - _free_bytes()) * (len(part.sizes) - 1)
    del graphs
    torch.cuda.empty_cache()
    # Layers use it one after another.
    context_bytes = max(layer.context_bytes for layer in model.modules() if isinstance(layer, Layer))
    return int(1.1 * step_bytes) + graph_bytes + context_bytes + SAFETY_BYTES


def _free_bytes() -> int:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free


class _AnyToken:
    """A grammar that allows every token; the kernel is the same for any grammar."""

    ended = False
    error: str | None = None

    def start(self, _: Sequence[int]) -> _AnyToken:
        return self

    def consume(self, _: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []

    def fill(self, words: Any) -> None:
        words[:] = -1

    def begin_fill(self, words: Any) -> None:
        self.fill(words)

    def finish_fill(self, words: Any) -> None:
        pass


def warm_up_batches(
    num_blocks: int, block_size: int, max_tokens: int, max_position: int, *, adapter_slot: int = -1
) -> Iterator[Batch]:
    """Yield steps in slots 0 and 1 that together launch each variant of each kernel outside the graphs.

    A kernel's variant depends on the number of tokens in the step, in powers of two, on the longest prompt, and on the
    rows' parameters. Compiling one takes a second, during which a running event loop would stand still. `adapter_slot`:
    slot of all rows' adapter, which adds nothing.
    """
    edited = SamplingParams(
        temperature=0.8,
        top_k=50,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        min_new_tokens=4,
        stop_token_ids=(0,),
        bad_words=((0,),),
        allowed_token_ids=(0, 1),
        logprobs=1,
        grammar=_AnyToken(),
    )
    sizes = [1 << power for power in range(max_tokens.bit_length()) if 1 << power < max_tokens] + [max_tokens]
    for step, size in enumerate(sizes):
        length = max(1, min(size, max_position - 3))  # Two tokens follow.
        blocks = [block % num_blocks for block in range(-(-(length + 2) // block_size))]
        params = SamplingParams() if step % 2 else edited
        known = [0] * length
        starts = [
            SlotStart(
                slot=slot,
                params=params,
                num_prompt=length,
                num_tokens=length,
                token_ids=known,
                adapter_slot=adapter_slot,
            )
            for slot in (0, 1)
        ]
        rows = [PrefillRow(slot=slot, tokens=known, position=0, sample=True) for slot in (0, 1)]
        tables = [(slot, 0, 0, blocks) for slot in (0, 1)]
        copies = [(0, 1)] if num_blocks > 1 else []
        yield Batch(step=0, starts=starts, new_blocks=tables, copies=copies, decode=[], prefill=rows[:1])
        yield Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[0], prefill=rows[1:])
        yield Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[0], prefill=[])


def mlp_sizes(max_tokens: int) -> list[int]:
    """Return token counts that together use every kernel of an MLP of up to `max_tokens` tokens: no table has a range
    that begins and ends between two of them."""
    powers = [1 << power for power in range(max_tokens.bit_length())]
    sizes = sorted({*powers, *(power * 3 // 2 for power in powers), max_tokens})
    return [size for size in sizes if size <= max_tokens]


@torch.inference_mode()
def warm_up_mlps(model: DecoderLM, max_tokens: int, *, adapted: bool = False, batch_invariant: bool = False) -> None:
    """Compile the kernels of MLPs, and those that group adapters, for steps of several prompts, which may have more
    tokens than one session."""
    device = next(model.parameters()).device
    kinds: dict[type, Any] = {type(block.mlp): block.mlp for block in model.layers if block.mlp is not None}
    for size in mlp_sizes(max_tokens):
        step = largest_step(
            0,
            [size],
            size,
            1,
            caches=(),
            columns=model.step_columns,
            batch_invariant=batch_invariant,
            adapted=adapted,
            device=device,
        )
        if adapted:
            group_adapters(step)
        x = model.embed(step.input_ids, step)
        for mlp in kinds.values():
            mlp(x, step)
