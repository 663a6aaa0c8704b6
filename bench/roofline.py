"""A picture of decode steps against what the card allows, by batch, from the JSON lines of throughput.py.

    python bench/roofline.py result.jsonl [peers.jsonl ...] --out roofline.png

The limit of a step is the time to read the weights, or to do their multiplications if that takes longer, and then the
time to read the keys and values of every request's context; bandwidth and speed are those of the `limits` line of the
files, or else an H200's. The shapes are those of Llama-3-8B in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import read_records
from workloads import batch_of, plan

READ_TBS = 4.34
MATMUL_TFLOPS = 814.0


@dataclass(frozen=True)
class Model:
    """What a step reads and computes."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    layers: int = 32
    vocab: int = 128256
    itemsize: int = 2

    @property
    def weights(self) -> int:
        """Parameters that a step multiplies with: all but the embedding, of which it reads a few rows."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


def step_limit_ms(
    batch: int, context: float, *, read_tbs: float = READ_TBS, matmul_tflops: float = MATMUL_TFLOPS, model: Model
) -> float:
    """Least milliseconds of a decode step of `batch` requests with `context` tokens each, on average."""
    reading = model.weights * model.itemsize / (read_tbs * 1e12)
    computing = 2 * model.weights * batch / (matmul_tflops * 1e12)
    return 1e3 * (max(reading, computing) + batch * context * model.kv_bytes / (read_tbs * 1e12))


def mean_context(name: str) -> float:
    """Tokens of context of a request of this work, averaged over its decode steps."""
    work = plan(name).whole[0]
    return work.num_prompt / len(work.prompts) + (work.new_tokens[0] - 1) / 2


def steps_by_engine(records: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Engine -> batch -> milliseconds of a step; of several figures the last counts."""
    engines: dict[str, dict[int, float]] = {}
    for record in records:
        batch = batch_of(str(record.get("work", "")))
        if batch is not None and "step_ms" in record:
            engines.setdefault(record["engine"], {})[batch] = record["step_ms"]
    return engines


def draw(records: Sequence[dict[str, Any]], path: Path, model: Model) -> None:
    """Write the picture. Raises ValueError when `records` has no step times."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    engines = steps_by_engine(records)
    if not engines:
        raise ValueError("no line has the step time of a batch: run bench/throughput.py --work b1,b16,... --json FILE")
    ceilings = next((record for record in reversed(records) if record.get("engine") == "limits"), {})
    read_tbs = ceilings.get("read_TBs", READ_TBS)
    matmul_tflops = ceilings.get("matmul_TFLOPs", MATMUL_TFLOPS)
    batches = sorted({batch for steps in engines.values() for batch in steps})
    limits = {
        batch: step_limit_ms(
            batch, mean_context(f"b{batch}"), read_tbs=read_tbs, matmul_tflops=matmul_tflops, model=model
        )
        for batch in batches
    }

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(batches, list(limits.values()), color="black", linestyle="--", label="limit")
    axes.fill_between(batches, 0, list(limits.values()), color="black", alpha=0.06)
    for number, (engine, steps) in enumerate(engines.items()):
        ordered = sorted(steps.items())
        axes.plot(*zip(*ordered, strict=True), marker="o", linewidth=2.5 if number == 0 else 1.2, label=engine)
        if number == 0:
            for batch, step in ordered:
                # Below the limit nothing can be in the way.
                note = f"{step:.2f} ms,\n{limits[batch] / step:.0%} of\nthe limit"
                place = (batch, limits[batch])
                axes.annotate(note, place, (0, -6), textcoords="offset points", ha="center", va="top", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(batches)
    axes.set_yticks([each * factor for each in (1, 10, 100) for factor in (1, 1.5, 2, 3, 4, 5, 6, 8)])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    slowest = max(max(steps.values()) for steps in engines.values())
    axes.set_ylim(bottom=min(limits.values()) / 1.5, top=slowest * 1.2)
    axes.margins(x=0.08)
    axes.set_xlabel("requests that decode together")
    axes.set_ylabel("milliseconds per step")
    axes.set_title(f"Llama-3-8B, bfloat16: decode step against {read_tbs} TB/s and {matmul_tflops:.0f} TFLOP/s")
    axes.grid(True, alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines; the engine that comes first is annotated")
    parser.add_argument("--out", type=Path, default=Path("roofline.png"), help="default: %(default)s")
    arguments = parser.parse_args()
    draw([record for path in arguments.files for record in read_records(path)], arguments.out, Model())


if __name__ == "__main__":
    main()
