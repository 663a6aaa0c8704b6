"""A Llama of random weights and a driver that plays the scheduler's part for a ModelAgent."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm.agent.model_agent import ModelAgent
from asyncllm.config import EngineConfig
from asyncllm.kernels import PagedKV
from asyncllm.layers.rotary import ROPE_LENS
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.config import HFConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import Llama
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, StepOutput

VOCAB_SIZE = 128
NAN_TOKEN = VOCAB_SIZE - 1
"""A token whose embedding is NaN: what it touches is not finite. Its own logit is 0, so greedy rows do not take it."""

GREEDY = SamplingParams(temperature=0.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids drawn at random, `NAN_TOKEN` not among them."""
    return random.Random(seed).choices(range(NAN_TOKEN), k=length)


def tiny_llama(**overrides: Any) -> DecoderLM:
    """Two layers, float32, weights large enough that the logits of different contexts differ well."""
    fields = {**Llama.tiny, "vocab_size": VOCAB_SIZE, **overrides}
    config = Llama.configure(HFConfig(fields), "LlamaForCausalLM")
    with torch.device("meta"):
        model = Llama(config)
    model.allocate(torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter[NAN_TOKEN] = torch.nan
            if "head" in name:
                parameter[NAN_TOKEN] = 0.0
    return model.eval()


def tiny_agent(model: DecoderLM | None = None, **settings: Any) -> ModelAgent:
    config = EngineConfig(
        **{"device_type": "cpu", "block_size": 4, "num_gpu_blocks": 80, "max_batch_size": 8, **settings}
    ).checked()
    return ModelAgent(config, Path("tiny"), model=model or tiny_llama())


class AheadAgent(ModelAgent):
    """An agent whose steps an executor launches in the loop's thread, several at a time, as those of a GPU."""

    @property
    def runs_ahead(self) -> bool:
        return True


@torch.inference_mode()
def plain_hidden(model: DecoderLM, tokens: Sequence[int]) -> Tensor:
    """Hidden states [tokens, hidden] of one forward pass over the whole sequence, in one block."""
    length, config = len(tokens), model.config
    shape = (1, config.num_kv_heads, length, config.head_dim)
    caches = [PagedKV.over(torch.zeros(2, *shape)) for _ in range(config.num_layers)]
    inputs = StepInputs(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(length),
        places=torch.arange(length),
        num_decode=0,
        q_offsets=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        max_q_len=length,
        caches=caches,
        more={ROPE_LENS: torch.full((length,), length)},
    )
    hidden: Tensor = model(inputs)
    return hidden


@torch.inference_mode()
def plain_logits(model: DecoderLM, tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of the same pass."""
    return model.logits(plain_hidden(model, tokens))


def plain_greedy(model: DecoderLM, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class Driver:
    """Allocates blocks in a scattered order and feeds sequences to an agent, each in a slot of its own."""

    def __init__(self, agent: ModelAgent) -> None:
        self.agent = agent
        self.num_steps = 0
        self.tables: dict[int, list[int]] = {}
        self.more_tables: dict[int, list[list[int]]] = {}
        """Slot -> its tables in the block groups after the first, if there are any: all blocks, whatever the window."""
        self.lengths: dict[int, int] = {}
        size = agent.limits.num_blocks
        self.free = sorted(range(size), key=lambda block: block * 37 % size)
        self._starts: list[SlotStart] = []
        self._new_blocks: list[tuple[int, int, int, list[int]]] = []

    def start(
        self, slot: int, prompt: Sequence[int], params: SamplingParams = GREEDY, answer: Sequence[int] = ()
    ) -> None:
        """The next step gives `slot` to a sequence with a prompt, and what was generated before a preemption."""
        self.release(slot)
        known = [*prompt, *answer]
        history = known if params.needs_history else []
        self._starts.append(
            SlotStart(slot=slot, params=params, num_prompt=len(prompt), num_tokens=len(known), token_ids=history)
        )

    def release(self, slot: int) -> None:
        tables = [self.tables.pop(slot, []), *self.more_tables.pop(slot, [])]
        self.free = [block for table in tables for block in table] + self.free
        self.lengths[slot] = 0

    def adopt(self, slot: int, blocks: list[int], length: int) -> None:
        """The next step gives the slot these blocks, whose first `length` tokens are computed already."""
        self.tables[slot], self.lengths[slot] = blocks, length
        self._new_blocks.append((slot, 0, 0, list(blocks)))

    def chunk(self, slot: int, tokens: Sequence[int], *, sample: bool = True, **scoring: Any) -> PrefillRow:
        return PrefillRow(slot=slot, tokens=list(tokens), position=self.lengths[slot], sample=sample, **scoring)

    def step(
        self,
        decode: Iterable[int] = (),
        prefill: Iterable[PrefillRow] = (),
        copies: Iterable[tuple[int, int]] = (),
    ) -> StepOutput:
        rows, slots = list(prefill), list(decode)
        new_blocks, self._new_blocks = self._new_blocks, []
        for slot, count in [(slot, 1) for slot in slots] + [(row.slot, len(row.tokens)) for row in rows]:
            self.lengths[slot] += count
            more: list[list[int]] = [[] for _ in self.agent.limits.windows[1:]]
            tables = [self.tables.setdefault(slot, []), *self.more_tables.setdefault(slot, more)]
            for group, table in enumerate(tables):
                needed = -(-self.lengths[slot] // self.agent.limits.block_size) - len(table)
                if needed > 0:
                    blocks, self.free = self.free[:needed], self.free[needed:]
                    new_blocks.append((slot, group, len(table), blocks))
                    table.extend(blocks)
        batch = Batch(
            step=self.num_steps,
            starts=self._starts,
            new_blocks=new_blocks,
            copies=list(copies),
            decode=slots,
            prefill=rows,
        )
        self._starts = []
        output = self.agent.step(batch)
        assert output.step == self.num_steps
        assert output.slots == slots + [row.slot for row in rows if row.sample]
        self.num_steps += 1
        return output

    def generate(
        self, slot: int, prompt: Sequence[int], count: int, params: SamplingParams = GREEDY, chunk: int = 1000
    ) -> list[int]:
        """Run one sequence alone to `count` new tokens."""
        self.start(slot, prompt, params)
        tokens: list[int] = []
        for begin in range(0, len(prompt), chunk):
            last = begin + chunk >= len(prompt)
            tokens += self.step(prefill=[self.chunk(slot, prompt[begin : begin + chunk], sample=last)]).tokens
        while len(tokens) < count:
            tokens += self.step(decode=[slot]).tokens
        return tokens
