"""`asyncllm lite`: the tools that produce a new checkpoint from an existing one, with LMDeploy's names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from asyncllm.cli import flags
from asyncllm.cli.flags import MODEL_HELP
from asyncllm.config import LITE_TOOLS, LiteConfig
from asyncllm.printable import in_terminal

__all__ = ["add", "spelled_out"]

_TRUTHS = {"true": "--", "false": "--no-"}


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--search-scale False`, as in LMDeploy's documentation, as `--no-search-scale`."""
    if arguments[:1] != ["lite"]:
        return list(arguments)
    spelled: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.replace("_", "-") == "--search-scale" and value.lower() in _TRUTHS:
            spelled.append(f"{_TRUTHS[value.lower()]}search-scale")
            continue
        before = spelled[-1].replace("_", "-") if spelled else ""
        if before == "--search-scale" and argument.lower() in _TRUTHS:
            spelled[-1] = f"{_TRUTHS[argument.lower()]}search-scale"
        else:
            spelled.append(argument)
    return spelled


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Give the command line its `lite`."""
    about = "Quantize a checkpoint, or merge an adapter into it."
    lite = commands.add_parser("lite", help=about, description=about)
    tools = lite.add_subparsers(title="tools", metavar="TOOL", required=True)
    for name, tool in LITE_TOOLS.items():
        parser = tools.add_parser(
            name, help=tool.about, description=tool.about, usage=f"asyncllm lite {name} [OPTIONS] MODEL"
        )
        parser.set_defaults(run=_run, parser=parser, tool=name)
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
        left_out = [field for field in LiteConfig.__struct_fields__ if field not in tool.options]
        flags.add(parser, LiteConfig, leave_out=left_out, defaults=tool.defaults)
        flags.add_plugin(parser)
        flags.add_unsupported(parser, ["trust_remote_code"])


def _run(options: argparse.Namespace) -> int:
    """Run one of the tools and print what it wrote."""
    from asyncllm.lite import TOOLS, QuantizeReport

    flags.check_unsupported(options)
    flags.load_plugins(options)
    given = {name: value for name, value in vars(options).items() if name in LiteConfig.__struct_fields__}
    if sys.stderr.isatty() and options.tool != "merge_lora":
        given["progress"] = _show
    report = TOOLS[options.tool](options.model, **given)
    if not isinstance(report, QuantizeReport):
        print(in_terminal(f"written to {report}"))
        return 0
    if report.comparison is not None:
        before, after, divergence = report.comparison
        print(f"on texts kept back: loss {before:.4f} before and {after:.4f} after, divergence {divergence:.2e}")
    print(in_terminal(f"{report.num_bytes / 1e6:.1f} MB written to {report.destination}"))
    return 0


def _show(done: int, count: int) -> None:
    print(f"\rlayer {done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)
