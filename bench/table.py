"""The figures of several engines side by side, from JSON lines.

    python bench/table.py result.jsonl peers.jsonl

One row per work and figure, one column per engine, and beside each engine but the first how many times as fast the
first one is. Where an engine was measured more than once, the last line counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

__all__ = ["emit", "format_table", "read_records"]

FIGURES = {
    "step_ms": ("step ms", False),
    "prefill_tok_s": ("prompt tok/s", True),
    "out_tok_s": ("output tok/s", True),
    "total_s": ("seconds in all", False),
}
"""Key of a record -> what the row is called, and whether more is better."""


def emit(record: dict[str, Any], path: Path | None) -> None:
    """Print a record as one line, and append it to the file if there is one."""
    line = json.dumps(record)
    tqdm.write(line, file=sys.stdout)  # above the progress bar, where one is shown
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line; lines that are no objects are passed over."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def format_table(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of all works in `records`, then the ceilings if there are any."""
    by_work: dict[str, dict[str, dict[str, Any]]] = {}
    ceilings = []
    for record in records:
        if record.get("engine") == "limits":
            ceilings.append(", ".join(f"{key} {value}" for key, value in record.items() if key != "engine"))
        elif "work" in record:
            by_work.setdefault(record["work"], {})[record["engine"]] = record
    engines = list(dict.fromkeys(engine for columns in by_work.values() for engine in columns))
    header = ["work", "figure", *engines[:1], *(cell for engine in engines[1:] for cell in (engine, "ratio"))]
    rows = [header, ["---"] * len(header)]
    for work, columns in by_work.items():
        for key, (label, more_is_better) in FIGURES.items():
            values = {engine: record[key] for engine, record in columns.items() if key in record}
            if values:
                rows.append([work, label, *_cells(values, engines, more_is_better)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([table, *(f"ceilings: {each}" for each in ceilings)])


def _cells(values: dict[str, float], engines: list[str], more_is_better: bool) -> list[str]:
    cells: list[str] = []
    ours = values.get(engines[0])
    for engine in engines:
        value = values.get(engine)
        cells.append("" if value is None else f"{value:,.3f}" if value < 100 else f"{value:,.0f}")
        if engine != engines[0]:
            known = value is not None and ours is not None
            cells.append(f"{ours / value if more_is_better else value / ours:.2f}" if known else "")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(format_table(record for path in parser.parse_args().files for record in read_records(path)))


if __name__ == "__main__":
    main()
