"""What it takes to copy KV blocks to host memory and back, and from which length on that beats computing them again.

    python bench/swap.py [--model FOLDER] [--tokens 1,16,64,256,1024,4096] [--config JSON] [--json FILE] [--plot FILE]

Copies move so many tokens' blocks, neighbours on the host, between pools of the model's shape: `out_GBs` and `in_GBs`.
On a GPU they are timed by its events, from the first gather to the last byte. Then the agent that runs the engine's
steps runs two steps for each length: one copies that many tokens up and computes the next one (`copy_ms`), the other
computes them all (`compute_ms`). `crossover_tokens` is where the first becomes the faster one, and stays it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from table import emit

from asyncllm import EngineConfig
from asyncllm.agent.cache.host_pool import BlockTransfers, allocate_host_pool
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import allocate_pool
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.locate import locate
from asyncllm.models.registry import read_config
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, SwapPlan

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
REPEATS = 7
"""Timed runs, of which the median counts, after one that warms up."""


def median_ms(run: Callable[[], float]) -> float:
    """Median of the milliseconds that `run` returns."""
    run()
    return statistics.median(run() for _ in range(REPEATS))


def time_copies(layout: CacheLayout, tokens: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """One record for each length: milliseconds and gigabytes per second, down and up."""
    most = -(-max(tokens) // layout.block_size)
    transfers = BlockTransfers(allocate_pool(layout, most, device), allocate_host_pool(layout, most))
    run = _on_gpu(transfers) if device.type == "cuda" else _on_cpu(transfers)
    records = []
    for length in tokens:
        pairs = [(block, block) for block in range(-(-length // layout.block_size))]
        size = len(pairs) * layout.block_bytes
        down = median_ms(lambda pairs=pairs: run(SwapPlan(swap_out=pairs)))  # type: ignore[misc]
        up = median_ms(lambda pairs=pairs: run(SwapPlan(swap_in=pairs)))  # type: ignore[misc]
        records.append(
            {
                "tokens": length,
                "blocks": len(pairs),
                "MB": round(size / 1e6, 3),
                "out_ms": round(down, 4),
                "in_ms": round(up, 4),
                "out_GBs": round(size / 1e6 / down, 2),
                "in_GBs": round(size / 1e6 / up, 2),
            }
        )
    return records


def _on_gpu(transfers: BlockTransfers) -> Callable[[SwapPlan], float]:
    def run(plan: SwapPlan) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        transfers.launch(plan)
        transfers.wait_for_copies()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return run


def _on_cpu(transfers: BlockTransfers) -> Callable[[SwapPlan], float]:
    def run(plan: SwapPlan) -> float:
        start = time.perf_counter()
        transfers.launch(plan)
        return (time.perf_counter() - start) * 1e3

    return run


class Steps:
    """Runs single steps of a sequence in slot 0."""

    def __init__(self, agent: ModelAgent) -> None:
        self._agent = agent
        self._step = 0

    def compute_ms(self, length: int) -> float:
        """A step that computes a prompt of `length` tokens."""
        return self._run(length, 0, SwapPlan())

    def copy_ms(self, length: int) -> float:
        """A step that copies `length` - 1 tokens up and computes the last one."""
        blocks = -(-(length - 1) // self._agent.limits.block_size)
        return self._run(length, length - 1, SwapPlan(swap_in=[(block, block) for block in range(blocks)]))

    def _run(self, length: int, position: int, swaps: SwapPlan) -> float:
        params = SamplingParams(temperature=0.0)
        start = SlotStart(slot=0, params=params, num_prompt=length, num_tokens=length, token_ids=[])
        tokens = [3 + index % (self._agent.limits.vocab_size - 3) for index in range(position, length)]
        batch = Batch(
            step=self._step,
            starts=[start],
            new_blocks=[(0, 0, 0, list(range(-(-length // self._agent.limits.block_size))))],
            copies=[],
            decode=[],
            prefill=[PrefillRow(slot=0, tokens=tokens, position=position, sample=True)],
            swaps=swaps,
        )
        self._step += 1
        return self._agent.step(batch).elapsed_ms


def crossover(tokens: Sequence[int], copying: Sequence[float], computing: Sequence[float]) -> float | None:
    """The length from which on copying stays faster, on straight lines between the measured ones; None: it never is.

    If it is faster throughout, that is the shortest length measured.
    """
    gains = [compute - copy for copy, compute in zip(copying, computing, strict=True)]
    if gains[-1] <= 0:
        return None
    for index in range(len(gains) - 1, 0, -1):
        if gains[index - 1] <= 0:
            share = -gains[index - 1] / (gains[index] - gains[index - 1])
            return tokens[index - 1] + share * (tokens[index] - tokens[index - 1])
    return tokens[0]


def draw(records: Sequence[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Write a picture of bandwidths and of both kinds of step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for key, label in (("out_GBs", "to the host"), ("in_GBs", "back")):
        # Lengths below a block copy one block each.
        figures = {each["MB"]: each[key] for each in records}
        left.plot(list(figures), list(figures.values()), marker="o", label=label)
    left.set_xlabel("MB copied")
    left.set_ylabel("GB/s")
    left.set_ylim(bottom=0)
    for key, label in (("copy_ms", "copied"), ("compute_ms", "computed again")):
        right.plot([each["tokens"] for each in records], [each[key] for each in records], marker="o", label=label)
    if summary["crossover_tokens"] is not None:
        right.axvline(summary["crossover_tokens"], color="black", linestyle="--", label="crossover")
    right.set_xlabel("tokens that a sequence had")
    right.set_ylabel("milliseconds until it goes on")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.suptitle(f"KV blocks of {summary['model']} on {summary['device']}, {summary['dtype']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def measure(
    model: str, tokens: Sequence[int], overrides: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(one record for each length, what they come to)."""
    folder = locate(model)
    longest, positions = max(tokens) + 1, read_config(folder).max_position
    if longest > positions:
        raise SystemExit(f"--tokens {max(tokens)}: the model has {positions} positions, and one more is needed.")
    plain = EngineConfig(**overrides)
    blocks = -(-longest // plain.tokens_per_block) + 1
    fields = {"max_batch_size": 1, "max_prefill_token_num": longest, "num_gpu_blocks": blocks, "num_cpu_blocks": blocks}
    config = EngineConfig(**{**fields, **overrides}).checked()
    agent = ModelAgent(config, folder)
    limits = agent.limits
    layout = agent._layout
    copies = time_copies(layout, tokens, torch.device(limits.device))
    steps = Steps(agent)
    for record in copies:
        length = record["tokens"] + 1
        record["copy_ms"] = round(median_ms(lambda length=length: steps.copy_ms(length)), 4)  # type: ignore[misc]
        record["compute_ms"] = round(median_ms(lambda length=length: steps.compute_ms(length)), 4)  # type: ignore[misc]
    found = crossover(tokens, [each["copy_ms"] for each in copies], [each["compute_ms"] for each in copies])
    summary = {
        "model": model,
        "device": limits.device,
        "dtype": limits.dtype,
        "block_size": limits.block_size,
        "crossover_tokens": None if found is None else round(found, 1),
    }
    return copies, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="lengths, rising (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs matplotlib)")
    arguments = parser.parse_args()
    tokens = sorted({int(each) for each in arguments.tokens.split(",")})
    records, summary = measure(arguments.model, tokens, json.loads(arguments.config))
    for record in (*records, summary):
        emit(record, arguments.json)
    if arguments.plot is not None:
        draw(records, summary, arguments.plot)


if __name__ == "__main__":
    main()
