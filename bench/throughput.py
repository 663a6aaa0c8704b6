"""Time the works of workloads.py: asyncllm, beside transformers in the same run, or beside figures of other engines.

    python bench/throughput.py
    python bench/throughput.py --model FOLDER --work b1,b256,mix --limits --json result.jsonl --beside peers.jsonl

With the bundled model this is b1, b16 and b64 with short prompts, against transformers, in a minute or two on a CPU.
With any other model it is all works, at their own lengths, against nobody. The engines take turns, and the best run of
each counts, so that a busy machine slows them alike. Figures go to --json as one JSON object per line, under the keys
that other engines' benchmarks of the same works print.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import limits
import torch
from engines import EngineProcess, Timed, open_ours, open_transformers
from table import emit, format_table, read_records
from tqdm import tqdm
from workloads import ALL_WORKS, Plan, Work, plan, record, token_ids, warm_up

from asyncllm.locate import locate
from asyncllm.text.tokenizer import Tokenizer

OURS = "asyncllm"
BUNDLED = "tiny-chat"


def measure(
    plans: Sequence[Plan],
    engines: dict[str, Timed],
    warm_ups: Sequence[Work],
    report: Callable[[dict[str, Any]], None],
    repeat: int = 1,
) -> None:
    """Warm up, then time each plan, all its runs `repeat` times, the engines in turns.

    Each record is reported as soon as it is known, by plan, then engine.
    """
    runs = len(warm_ups) + repeat * sum(len(each.first) + len(each.whole) for each in plans)
    with tqdm(total=runs * len(engines), unit="run", file=sys.stderr, leave=False) as progress:

        def timed(label: str, works: Sequence[Work]) -> dict[str, list[float]]:
            progress.set_description(label)
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for work in works:
                for name, run in engines.items():
                    seconds[name].append(run(work))
                    progress.update()
            return seconds

        timed("warm-up", warm_ups)
        for each in plans:
            first, whole = timed(each.name, each.first * repeat), timed(each.name, each.whole * repeat)
            for name in engines:
                report(record(each, name, first[name], whole[name]))


def measure_limits() -> dict[str, Any]:
    """The card's own ceilings, from a process that has given all memory back when this returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(limits.measure)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED, help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--work", help=f"comma-separated, of {', '.join(ALL_WORKS)}, and b with any number")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields for asyncllm")
    parser.add_argument("--prompt-len", type=int, help="tokens per prompt, instead of the work's own")
    parser.add_argument("--new-tokens", type=int, help="tokens per answer, instead of the work's own")
    parser.add_argument("--repeat", type=int, default=1, help="times that each run is repeated; the best counts")
    parser.add_argument("--against", choices=["transformers", "none"], help="who takes turns with asyncllm")
    parser.add_argument("--limits", action="store_true", help="measure the card's own ceilings first")
    parser.add_argument("--beside", action="append", default=[], metavar="FILE", help="print these JSON lines as well")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append the figures to this file")
    parsed = parser.parse_args(arguments)
    if parsed.limits and not torch.cuda.is_available():
        parser.error("--limits measures a GPU, and torch finds none here. Leave it out.")
    bundled = parsed.model == BUNDLED
    parsed.work = parsed.work or ("b1,b16,b64" if bundled else ",".join(ALL_WORKS))
    parsed.against = parsed.against or ("transformers" if bundled else "none")
    if bundled:
        parsed.prompt_len, parsed.new_tokens = parsed.prompt_len or 64, parsed.new_tokens or 128
    return parsed


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ids = token_ids(Tokenizer.from_folder(locate(arguments.model)).vocab_size)
    plans = [
        plan(name, prompt_len=arguments.prompt_len, new_tokens=arguments.new_tokens, ids=ids)
        for name in arguments.work.split(",")
    ]
    records: list[dict[str, Any]] = []

    def report(figures: dict[str, Any]) -> None:
        records.append(figures)
        emit(figures, arguments.json)

    if arguments.limits:
        report(measure_limits())
    with ExitStack() as processes:
        engines: dict[str, Timed] = {}

        def start(name: str, *how: Any) -> None:
            process = EngineProcess(*how)
            processes.callback(process.close)
            engines[name] = process.run

        start(OURS, open_ours, arguments.model, arguments.config)
        if arguments.against == "transformers":
            for dtype in ("auto", "float32"):
                start(f"transformers {dtype}", open_transformers, arguments.model, dtype)
        measure(plans, engines, warm_up(plans, ids), report, arguments.repeat)
    beside = [each for path in arguments.beside for each in read_records(Path(path))]
    print(format_table(records + beside))


if __name__ == "__main__":
    main()
