"""What answers that are held to grammars cost a step, and those beside them that are not.

    python bench/grammars.py --model FOLDER
    python bench/grammars.py --model FOLDER --rows 256 --held 0,1,16,64,256 --kind pattern --json FILE

All rows are asked at once, at temperature 1, so many of them with a grammar. A level is run --repeat times, the levels
in turn, and the best run counts. The keys, in milliseconds, are between a row's tokens but for the first ones:

    step_ms    the mean over the run
    free_ms    the median of rows without a grammar
    held_ms    the median of rows with one; a chunk of several forced tokens counts once for each
    forced     tokens of held rows that came without a step of their own, as a share
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from engines import engine_config
from table import emit
from tqdm import tqdm
from workloads import static, token_ids

from asyncllm import AsyncEngine, GenerationConfig

PROMPT_LEN = 32

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "price": {"type": "number"},
        "kind": {"enum": ["small", "medium", "large"]},
    },
    "required": ["name", "count", "price", "kind"],
}


def response_format(kind: str, number: int) -> dict[str, Any]:
    """A grammar whose answers do not end soon, another one for each `number`.

    "json" has keys, which are forced, and free texts and numbers; of "pattern" nothing is forced.
    """
    if kind == "pattern":
        return {"type": "regex_schema", "regex_schema": f"[a-z0-9 ,.]{{{4000 + number}}}"}
    schema = {"type": "array", "items": ITEM, "minItems": 500 + number}
    return {"type": "json_schema", "json_schema": {"name": "items", "schema": schema}}


@dataclass
class Row:
    """When the chunks of one answer came, and with how many tokens."""

    held: bool
    chunks: list[tuple[float, int]] = field(default_factory=list)

    def gaps(self) -> list[float]:
        """Seconds between two tokens; those of a chunk share its gap."""
        return [
            (time - before) / tokens for (before, _), (time, tokens) in pairwise(self.chunks) for _ in range(tokens)
        ]


async def read(engine: AsyncEngine, prompt: list[int], config: GenerationConfig) -> Row:
    row = Row(config.response_format is not None)
    async for chunk in engine.generate(input_ids=prompt, gen_config=config):
        if chunk.token_ids:
            row.chunks.append((time.perf_counter(), len(chunk.token_ids)))
    return row


async def run_level(engine: AsyncEngine, rows: int, held: int, tokens: int, kind: str) -> dict[str, Any]:
    """The figures of one run with so many held rows."""
    prompts = static(rows, PROMPT_LEN, tokens, seed=held, ids=token_ids(engine.limits.vocab_size)).prompts
    configs = [
        GenerationConfig(
            max_new_tokens=tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            ignore_eos=True,
            random_seed=row,
            response_format=response_format(kind, row) if row < held else None,
        )
        for row in range(rows)
    ]
    before = engine.stats().steps
    answered = await asyncio.gather(*map(read, [engine] * rows, prompts, configs))
    steps = engine.stats().steps - before
    begun, ended = max(row.chunks[0][0] for row in answered), min(row.chunks[-1][0] for row in answered)
    spans = [row.gaps() for row in answered]
    free = [gap for row, gaps in zip(answered, spans, strict=True) if not row.held for gap in gaps]
    bound = [gap for row, gaps in zip(answered, spans, strict=True) if row.held for gap in gaps]
    of_held = [row for row in answered if row.held]
    chunks, taken = sum(len(row.chunks) for row in of_held), sum(n for row in of_held for _, n in row.chunks)
    return {
        "held": held,
        "rows": rows,
        "steps": steps,
        "step_ms": round(1e3 * (ended - begun) / (tokens - 1), 3),
        "free_ms": round(1e3 * float(np.median(free)), 3) if free else None,
        "held_ms": round(1e3 * float(np.median(bound)), 3) if bound else None,
        "forced": round(1 - chunks / taken, 3) if taken else 0.0,
    }


async def measure(engine: AsyncEngine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The best run of each level."""
    levels = [int(level) for level in arguments.held.split(",")]
    best: dict[int, dict[str, Any]] = {}
    async with engine:
        # Compiles the grammars, which later runs share.
        await run_level(engine, arguments.rows, max(levels), 8, arguments.kind)
        with tqdm(total=arguments.repeat * len(levels), file=sys.stderr, leave=False) as progress:
            for _ in range(arguments.repeat):
                for held in levels:
                    figures = await run_level(engine, arguments.rows, held, arguments.tokens, arguments.kind)
                    emit({"work": f"grammars_{arguments.kind}", **figures}, arguments.json)
                    if held not in best or figures["step_ms"] < best[held]["step_ms"]:
                        best[held] = figures
                    progress.update()
    return [best[held] for held in levels]


def format_table(results: list[dict[str, Any]]) -> str:
    """One line for each level."""
    keys = ("held", "step_ms", "free_ms", "held_ms", "forced", "steps")
    rows = [[*keys], ["---"] * len(keys), *([str(result[key]) for key in keys] for result in results)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="answers at once (default: %(default)s)")
    parser.add_argument("--held", default="0,1,16,64,256", help="rows with a grammar (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--kind", choices=("json", "pattern"), default="json", help="of grammar (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each level (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    engine = AsyncEngine(arguments.model, engine_config(arguments.model, arguments.config))
    print(format_table(asyncio.run(measure(engine, arguments))))


if __name__ == "__main__":
    main()
