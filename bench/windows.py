"""What sliding windows save: sequences that run at one time in a cache of equal size, without a model.

    python bench/windows.py [--gib 40] [--requests 200]

The scheduler runs long prompts to their end, all there from the start, once with the block groups of the model's layers
and once with one group that keeps everything; a step costs nothing. Chunks have up to 8,192 tokens, blocks 64.
"""

from __future__ import annotations

import argparse

import torch
from scheduler import BLOCK_SIZE, VOCAB, new_request, run_step

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.layers.cache_spec import PagedKVSpec
from asyncllm.protocol import Limits
from asyncllm.testing import ByteTokenizer

CHUNK, ROWS, ANSWER = 8192, 256, 256
MODELS = {
    "Mistral-7B-v0.1": ([PagedKVSpec(8, 128, 4096)] * 32, 32768),
    "Gemma-2-9B": ([PagedKVSpec(8, 256, 4096), PagedKVSpec(8, 256)] * 21, 8192),
}
"""Layers, and tokens of each sequence: what the model takes."""


def measure(specs: list[PagedKVSpec], length: int, num_bytes: int, num_requests: int) -> tuple[int, int, int]:
    """Return blocks, most rows that have decoded in one step, and steps for all requests."""
    layout = CacheLayout(specs, BLOCK_SIZE, torch.bfloat16, longest=length)
    limits = Limits(
        num_blocks=num_bytes // layout.block_bytes,
        block_size=BLOCK_SIZE,
        windows=layout.windows,
        max_position=length,
        vocab_size=VOCAB,
        hidden_size=1,
        num_slots=2 * ROWS,
    )
    scheduler = Scheduler(
        limits,
        max_batch_size=ROWS,
        prefill_budget=CHUNK,
        prefill_interval=1,
        prefix_caching=False,
        swapping=False,
    )
    tokenizer = ByteTokenizer()
    for number in range(num_requests):
        scheduler.add(new_request(number, tokenizer, prompt_len=length - ANSWER, max_new_tokens=ANSWER))
    most = 0
    batch = scheduler.schedule()
    while batch is not None:
        most = max(most, len(batch.decode))
        following = scheduler.schedule()
        scheduler.update(run_step(batch))
        batch = following or scheduler.schedule()
    assert scheduler.counts.sampled_tokens == num_requests * ANSWER
    return limits.num_blocks, most, scheduler.counts.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=40, help="Size of the cache.")
    parser.add_argument("--requests", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{'model':16} {'length':>7} {'cache':>14} {'blocks':>7} {'rows':>5} {'their tokens':>13} {'steps':>6}")
    for name, (specs, length) in MODELS.items():
        whole = [PagedKVSpec(spec.num_kv_heads, spec.head_dim) for spec in specs]
        for title, kept in (("one group", whole), ("block groups", specs)):
            blocks, rows, steps = measure(kept, length, int(arguments.gib * 2**30), arguments.requests)
            print(f"{name:16} {length:7,} {title:>14} {blocks:7,} {rows:5} {rows * length:13,} {steps:6,}")


if __name__ == "__main__":
    main()
