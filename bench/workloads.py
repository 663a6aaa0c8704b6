"""What every engine is timed on: token ids in and out, so that no tokenizer is measured.

Every answer runs to its full length. The works, their lengths and their random draws are fixed, so that figures of
several engines, taken in separate programs, belong side by side:

    b1, b16, b64, b256  that many requests at once: 128 tokens in for b1, 512 for the others, 257 out
    prefill             32 prompts of 2,048 tokens, 1 out
    mix                 1,000 requests of lognormal lengths, as chat logs have, greedy
    mix_sample          the same requests, sampled

A batch is timed twice over: with answers of one token (`first`), and with whole ones. The difference is decoding alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

__all__ = ["ALL_WORKS", "Plan", "Work", "mixed", "plan", "record", "static", "token_ids", "warm_up"]

ALL_WORKS = ("b1", "b16", "b64", "b256", "prefill", "mix", "mix_sample")

LARGE_VOCAB_IDS = range(1000, 120_000)
"""Plain tokens of vocabularies as large as Llama 3's."""

LONGEST = 1024
"""Cap of the lengths of `mixed`, in and out; 4 is the least."""

MIXED_REQUESTS = 1000


@dataclass(frozen=True)
class Work:
    """Requests that are all there at the start, with the length of each one's answer."""

    prompts: list[list[int]]
    new_tokens: list[int]
    sampled: bool = False
    """Temperature 0.8, top_p 0.95, top_k 50; else greedy."""

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_new(self) -> int:
        return sum(self.new_tokens)


@dataclass(frozen=True)
class Plan:
    """What is run for one work. The best time of each list counts."""

    name: str
    whole: list[Work]
    first: list[Work] = field(default_factory=list)
    """The same shape with answers of one token; empty where no step time is wanted."""


def token_ids(vocab_size: int) -> range:
    """The ids to draw from: fixed for large vocabularies; for small ones, all above the special tokens."""
    return LARGE_VOCAB_IDS if vocab_size >= LARGE_VOCAB_IDS.stop else range(64, vocab_size)


def static(batch: int, prompt_len: int, new_tokens: int, *, seed: int, ids: range = LARGE_VOCAB_IDS) -> Work:
    """`batch` random prompts of one length."""
    draw = random.Random(seed)
    return Work([_prompt(draw, prompt_len, ids) for _ in range(batch)], [new_tokens] * batch)


def mixed(count: int, *, seed: int = 1, ids: range = LARGE_VOCAB_IDS, sampled: bool = False) -> Work:
    """Lognormal lengths: about 200 in and 190 out on average."""
    draw = random.Random(seed)
    prompt_lens = [_length(draw, 1.0) for _ in range(count)]
    new_tokens = [_length(draw, 0.9) for _ in range(count)]
    return Work([_prompt(draw, length, ids) for length in prompt_lens], new_tokens, sampled)


def _prompt(draw: random.Random, length: int, ids: range) -> list[int]:
    return [draw.randrange(ids.start, ids.stop) for _ in repeat(None, length)]


def _length(draw: random.Random, sigma: float) -> int:
    return max(4, min(LONGEST, int(draw.lognormvariate(4.9, sigma))))


def batch_of(name: str) -> int | None:
    """16 of "b16"; None for the works that are not fixed batches."""
    digits = name.removeprefix("b")
    return int(digits) if name.startswith("b") and digits.isdigit() and int(digits) else None


def plan(
    name: str, *, prompt_len: int | None = None, new_tokens: int | None = None, ids: range = LARGE_VOCAB_IDS
) -> Plan:
    """The runs of one work: "prefill", "mix", "mix_sample" or "b" with any number.

    `prompt_len` and `new_tokens` replace a batch's own lengths, and the prompt length of prefill. Raises ValueError for
    other names, and for a batch with answers of less than 2 tokens, which have no decode step.
    """
    batch = batch_of(name)
    if batch is not None:
        length = prompt_len or (128 if batch == 1 else 512)
        steps = new_tokens or 257
        if steps < 2:
            raise ValueError(f"{name} times decode steps: it needs at least 2 new tokens")
        return Plan(
            name,
            whole=[static(batch, length, steps, seed=seed, ids=ids) for seed in ((5, 6, 7) if batch == 1 else (5, 6))],
            first=[static(batch, length, 1, seed=seed, ids=ids) for seed in (3, 4)],
        )
    if name == "prefill":
        return Plan(name, whole=[static(32, prompt_len or 2048, 1, seed=seed, ids=ids) for seed in (8, 9)])
    if name in ("mix", "mix_sample"):
        return Plan(name, whole=[mixed(MIXED_REQUESTS, ids=ids, sampled=name == "mix_sample")])
    raise ValueError(f"no work {name!r}; there are prefill, mix, mix_sample, and b1, b16 or b with any other number")


def warm_up(plans: Sequence[Plan], ids: range = LARGE_VOCAB_IDS) -> list[Work]:
    """Short works to run before `plans` are timed: a small batch, and one as large as theirs, but at most 300."""
    largest = max(len(work.prompts) for each in plans for work in each.whole)
    return [static(4, 64, 8, seed=99, ids=ids), static(min(300, largest), 32, 16, seed=98, ids=ids)]


def record(plan: Plan, engine: str, first_s: Sequence[float], total_s: Sequence[float]) -> dict[str, Any]:
    """The figures of one work, from the seconds of the runs in `plan.first` and `plan.whole`."""
    work, total = plan.whole[0], min(total_s)
    if plan.first:
        first = min(first_s)
        # The first token comes with the prompt; each later one takes a step.
        steps = work.new_tokens[0] - 1
        decode = total - first
        figures = {
            "first_s": round(first, 4),
            "total_s": round(total, 4),
            "decode_tok_s": round(len(work.prompts) * steps / decode, 1),
            "step_ms": round(1000 * decode / steps, 3),
        }
    elif plan.name == "prefill":
        figures = {"total_s": round(total, 4), "prefill_tok_s": round(work.num_prompt / total)}
    else:
        figures = {
            "total_s": round(total, 3),
            "out_tok_s": round(work.num_new / total, 1),
            "total_tok_s": round((work.num_new + work.num_prompt) / total, 1),
            "rps": round(len(work.prompts) / total, 2),
            "n_in": work.num_prompt,
            "n_out": work.num_new,
        }
    return {"work": plan.name, **figures, "engine": engine}
