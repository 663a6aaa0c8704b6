"""The command line. It starts fast, because each command imports its dependencies when it runs."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from asyncllm import __version__
from asyncllm.cli import batch, debug, flags, lite
from asyncllm.cli import serve as serve_command
from asyncllm.cli.conversations import LocalConversation
from asyncllm.cli.flags import (
    DEFAULT_MODEL,
    DEFAULT_VISION_MODEL,
    MODEL_HELP,
    add_model_settings,
    add_plugin,
    load_plugins,
    load_template,
)
from asyncllm.cli.terminal import CHAT_HELP, converse, print_answer
from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.errors import AsyncLLMError, InvalidParameter, UnsupportedFeature
from asyncllm.locate import BUNDLED
from asyncllm.printable import in_terminal, to_stderr

if TYPE_CHECKING:
    from asyncllm.pipeline import Pipeline

__all__ = ["run_command"]

WRONG_USAGE = 2
"""Exit status of argparse."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that is full or failed, or of a terminal that is gone."""


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, as `main` does. Raises KeyboardInterrupt."""
    _open_missing_streams()
    _take_any_characters()
    try:
        try:
            return _command_status(sys.argv[1:] if arguments is None else arguments)
        finally:
            if not sys.stdout.closed:
                sys.stdout.flush()
    except BrokenPipeError:
        _give_up(sys.stdout)
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _give_up(sys.stdout)
        name = error.filename or "The output"
        to_stderr(f"asyncllm: {name} cannot be written: {error.strerror}. Free some space, or write elsewhere.")
        return 1
    finally:
        if not sys.stderr.closed:
            try:
                sys.stderr.flush()
            except OSError:
                _give_up(sys.stderr)


def _command_status(arguments: Sequence[str]) -> int:
    options = _parser().parse(_spelled_out(arguments))
    try:
        return int(options.run(options))
    except InvalidParameter as error:
        to_stderr(f"{options.parser.format_usage()}{options.parser.prog}: error: {flags.refuse(error, options.parser)}")
        return WRONG_USAGE
    except AsyncLLMError as error:
        to_stderr(f"asyncllm: {error}")
        return 1


def _open_missing_streams() -> None:
    """Give a process without standard streams, such as a daemon, empty input and output that is dropped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the end


def _take_any_characters() -> None:
    """Make output escape characters that the terminal cannot encode, and input keep bytes that it cannot decode, so
    that they are refused where they are used."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    return lite.spelled_out(serve_command.spelled_out(arguments))


def _give_up(stream: TextIO) -> None:
    """Discard the rest of a stream whose reader has left or whose disk is full: flushing it at exit would fail, and
    change the exit status."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _parser() -> flags.Parser:
    parser = flags.Parser(prog="asyncllm", description="LLM inference as an asyncio library.")
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help_text: str, **extra: Any) -> flags.Parser:
        added: flags.Parser = commands.add_parser(name, help=help_text, description=help_text, **extra)
        added.set_defaults(run=run, parser=added)
        return added

    chat = command("chat", _chat, f"Have a conversation. {CHAT_HELP}", usage="asyncllm chat [OPTIONS] [MODEL]")
    chat.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    _add_settings(chat)

    usage = "asyncllm run [OPTIONS] [MODEL] [PROMPT]"
    run = command("run", _run, "Answer one prompt, given or on standard input, and exit.", usage=usage)
    run.add_argument("--image", action="append", metavar="FILE", help="An image of the prompt, or a URL; repeatable.")
    run.add_argument(
        "words",
        nargs="*",
        metavar="MODEL PROMPT",
        help=f"{MODEL_HELP[:-1]}, with images {DEFAULT_VISION_MODEL}. PROMPT '-': standard input.",
    )
    _add_settings(run)

    serve_command.add(commands)
    batch.add(commands)
    lite.add(commands)
    debug.add(commands)

    about = "Check whether this machine can run asyncllm, and say what to change."
    doctor = command("doctor", _doctor, about, aliases=["check_env"])
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="Also look at this checkpoint's folder.")
    doctor.add_argument("--json", action="store_true", help="Print the verdicts as JSON.")
    doctor.add_argument("--dump-file", metavar="FILE", help="Write them to this file instead.")
    add_plugin(doctor)

    listing = command("list", _list, "List the built-in chat templates and the model architectures.")
    listing.add_argument("--json", action="store_true", help="Print them as JSON.")
    add_plugin(listing)

    convert = command("convert", _convert, "Convert a checkpoint of .bin files to safetensors.")
    convert.add_argument("source", metavar="SRC", help="Folder of the checkpoint.")
    convert.add_argument("destination", nargs="?", metavar="DST", help="Folder to write. Default: next to SRC.")
    of_lmdeploy = ("--dst-path", "--model-format", "--tokenizer-path", "--tp", "--group-size", "--quant-path")
    of_hub = ("--revision", "--download-dir", "--trust-remote-code")
    convert.add_argument(*of_lmdeploy, *of_hub, dest="lmdeploy", nargs="?", const="", help=argparse.SUPPRESS)
    return parser


def _add_settings(parser: flags.Parser) -> None:
    add_model_settings(parser)
    parser.add_argument("--adapter-name", metavar="NAME", help="Which of --adapters answers. Default: none.")
    flags.add(parser.add_argument_group("answers"), GenerationConfig, leave_out=("n", "logprobs", "prompt_logprobs"))


def _open(options: argparse.Namespace, model: str) -> tuple[Pipeline, GenerationConfig]:
    from asyncllm.pipeline import Pipeline

    flags.check_unsupported(options)
    generation = flags.load(options, GenerationConfig)
    engine = flags.load(options, EngineConfig)
    return Pipeline(model, engine, load_template(options)), generation


def _run(options: argparse.Namespace) -> int:
    model, prompt = _model_and_prompt(options)
    pipe, generation = _open(options, model)
    asked = (prompt, options.image) if options.image else prompt
    with pipe:
        ending = print_answer(
            pipe.stream_infer(asked, generation, adapter_name=options.adapter_name, separate_reasoning=False)
        )
    print()
    if ending == "length":
        to_stderr(f"(cut after {generation.max_new_tokens} tokens; see --max-new-tokens)")
    return 1 if ending in ("error", "abort") else 0


def _model_and_prompt(options: argparse.Namespace) -> tuple[str, str]:
    words: list[str] = options.words
    if len(words) > 2:
        options.parser.error(f"too many arguments: {words[2]!r}. Put the prompt into quotes.")
    if len(words) == 1 and (words[0] in BUNDLED or os.path.isfile(os.path.join(words[0], "config.json"))):
        words = [words[0], "-"]
    usual = DEFAULT_VISION_MODEL if options.image else DEFAULT_MODEL
    model, prompt = ([usual, "-"] if not words else [usual, *words])[-2:]
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\n")
    if not prompt:
        options.parser.error("the prompt is empty: pass it in quotes, or on standard input")
    return model, prompt


def _chat(options: argparse.Namespace) -> int:
    pipe, generation = _open(options, options.model)
    with pipe:
        converse(pipe.model_name, LocalConversation(pipe, generation, options.adapter_name))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from asyncllm.cli import doctor

    load_plugins(options)
    checks = doctor.examine(options.model)
    text = doctor.as_json(checks) if options.json else doctor.as_text(checks)
    if options.dump_file is None:
        print(text if options.json else in_terminal(text))
    else:
        try:
            with open(options.dump_file, "w", encoding="utf-8") as file:
                print(text, file=file)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidParameter(f"{options.dump_file} cannot be written: {reason}.", "dump_file") from None
    return 1 if any(check.verdict == "fail" for check in checks) else 0


def _list(options: argparse.Namespace) -> int:
    """Print the names of chat templates and architectures."""
    from asyncllm.models.registry import families
    from asyncllm.text.templates.registry import names as template_names

    load_plugins(options)
    names = {"chat_templates": template_names(), "architectures": list(families())}
    if options.json:
        import json

        print(json.dumps(names, indent=2))
        return 0
    for title, entries in names.items():
        print(f"{title.replace('_', ' ')}:")
        print("".join(f"  {entry}\n" for entry in entries), end="")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from pathlib import Path

    from asyncllm.models.loading.convert import convert

    if options.lmdeploy is not None:
        raise UnsupportedFeature(
            "LMDeploy's conversion to its own format is not needed: open the model as the hub has it, with "
            "`asyncllm chat MODEL`. `asyncllm convert SRC [DST]` converts .bin files."
        )
    report = convert(Path(options.source), Path(options.destination) if options.destination else None)
    print(f"{report.num_tensors} tensors, {report.num_bytes / 1e6:.1f} MB in {len(report.files)} file(s)")
    for name in report.dropped:
        print(in_terminal(f"left out {name}: it is tied to the embedding"))
    print(f"written to {report.destination}")
    return 0
