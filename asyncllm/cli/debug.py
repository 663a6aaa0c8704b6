"""`asyncllm debug compare`: compares a checkpoint's layers with transformers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from asyncllm.cli.flags import MODEL_HELP, add_plugin, load_plugins
from asyncllm.printable import in_terminal

if TYPE_CHECKING:
    from asyncllm.porting import Comparison

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Give the command line its `debug`."""
    debug = commands.add_parser("debug", help="Inspect a model.", description="Inspect a model.")
    tools = debug.add_subparsers(title="tools", metavar="TOOL", required=True)
    about = "Run the same tokens here and in transformers, and show where they diverge. Exit status 1 if they do."
    usage = "asyncllm debug compare MODEL [OPTIONS]"
    compare = tools.add_parser("compare", help=about, description=about, usage=usage)
    compare.set_defaults(run=_compare, parser=compare)
    compare.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    compare.add_argument("--tokens", type=int, nargs="+", metavar="ID", help="Token ids. Default: random ones.")
    compare.add_argument("--count", type=int, default=32, metavar="INT", help="How many random ids. Default: 32.")
    compare.add_argument("--seed", type=int, default=0, metavar="INT", help="Seed of the random ids. Default: 0.")
    compare.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="Where both run. Default: cpu.")
    compare.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="FLOAT", help="Relative difference allowed. Default: 0.001."
    )
    add_plugin(compare)


def _compare(options: argparse.Namespace) -> int:
    """Compare a model's layers with transformers. Return the exit status: 1 if they differ."""
    from asyncllm.locate import locate
    from asyncllm.porting import compare

    load_plugins(options)
    result = compare(
        locate(options.model),
        tokens=options.tokens,
        count=options.count,
        seed=options.seed,
        device=options.device,
        tolerance=options.tolerance,
    )
    print(in_terminal(_as_text(result)))
    return 0 if result.first is None else 1


def _as_text(result: Comparison) -> str:
    """Return one line per layer, with the parts of a layer only for the first one that differs."""
    first = result.first
    shown = "" if first is None else " ".join(first.place.split()[:2])
    lines = [f"{'':22}{'largest':>10}{'relative':>10}"]
    for place, largest, relative in result.differences:
        inner = place.count(" ") == 2
        if inner and not place.startswith(f"{shown} "):
            continue
        name = f"  {place.split()[-1]}" if inner else place
        lines.append(f"{name:22}{largest:10.1e}{relative:10.1e}{'' if relative <= result.tolerance else '  differs'}")
    lines.append("the same" if first is None else f"the first place that differs: {first.place}")
    return "\n".join(lines)
