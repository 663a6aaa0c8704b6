"""What each way to quantize costs `tiny-chat`: exactly right answers, and the divergence from the plain model.

    python bench/quantized.py
    python bench/quantized.py --row "plain rounding" --row awq --row gptq --json result.json

Every row is one checkpoint, made by a tool of `asyncllm.lite` with the bundled texts, and one setting of the engine;
all answer the questions of `bench/quality.py`, and are compared one by one with the answers of the plain model in
float32. The divergence is that of the next token's distribution, in nats, at each token of every eighth question with
the plain model's answer behind it: texts that no tool has seen. It ends with exit code 1 if a row loses more than its
bound allows, or the negative control loses too little.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from quality import ask, asked_questions, prompt_of
from torch import Tensor

from asyncllm import EngineConfig, Pipeline, pipeline
from asyncllm.lite import TOOLS

PLAIN = "plain rounding"
PLAIN_PART = 2 / 3
"""What AWQ and GPTQ may lose at most, as a part of what plain rounding loses."""

DIVERGED_QUESTIONS = slice(None, None, 8)
BATCH_SIZE = 32
"""Sequences whose logits are in memory together."""


@dataclass(frozen=True)
class Bound:
    """What a row may lose at most."""

    points: float
    """Of 100 right answers."""
    divergence: float
    """In nats."""


EIGHT_BITS = Bound(0.5, 5e-4)
FOUR_BIT_CACHE = Bound(2.0, 5e-3)
AT_LEAST = 10.0
"""Points that the negative control has to lose."""


@dataclass(frozen=True)
class Row:
    """A checkpoint and a setting."""

    tool: str = ""
    """Of `asyncllm.lite`; none for the plain checkpoint."""
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig."""
    bound: Bound | None = None
    part_of_plain: bool = False
    """Whether it may lose `PLAIN_PART` of what plain rounding loses."""
    control: bool = False
    """Whether it has to fail."""


NO_TEXTS = {"calib_samples": 0, "search_clip": False}

ROWS: Mapping[str, Row] = {
    PLAIN: Row("auto_awq", NO_TEXTS),
    "awq, to nearest": Row("auto_awq", {"compensate": False}),
    "awq": Row("auto_awq", part_of_plain=True),
    "gptq as published": Row("auto_gptq", {"w_sym": True, "search_scale": False}),
    "gptq, no scales": Row("auto_gptq", {"search_scale": False}),
    "gptq, symmetric": Row("auto_gptq", {"w_sym": True}),
    "gptq": Row("auto_gptq", part_of_plain=True),
    "gptq, 2 bits": Row("auto_gptq", {"w_bits": 2}, control=True),
    "int8": Row("smooth_quant", bound=EIGHT_BITS),
    "fp8": Row("smooth_quant", {"quant_dtype": "fp8"}, bound=EIGHT_BITS),
    "fp8 in blocks": Row("blocked_fp8", bound=EIGHT_BITS),
    "fp8 at load": Row(config={"model_format": "fp8"}, bound=EIGHT_BITS),
    "cache of 8 bits": Row(config={"quant_policy": 8}, bound=EIGHT_BITS),
    "cache in fp8": Row(config={"quant_policy": "fp8"}, bound=EIGHT_BITS),
    "cache of 4 bits": Row(config={"quant_policy": 4}, bound=FOUR_BIT_CACHE),
    "awq, cache of 8 bits": Row("auto_awq", config={"quant_policy": 8}),
    "awq, cache of 4 bits": Row("auto_awq", config={"quant_policy": 4}),
    "int8, cache of 8 bits": Row("smooth_quant", config={"quant_policy": 8}),
    "fp8 in blocks, cache in fp8": Row("blocked_fp8", config={"quant_policy": "fp8"}),
}


@dataclass(frozen=True)
class Figures:
    """What came of a row, beside the plain model."""

    right: int
    lost: int
    """Questions that the plain model alone answers right."""
    won: int
    """Those that it alone answers wrong."""
    asked: int
    divergence: float

    @property
    def points(self) -> float:
        """What the row loses of 100 answers."""
        return 100 * (self.lost - self.won) / self.asked


class Reference:
    """The plain model in float32: its answers, and its distributions at texts with them."""

    def __init__(self, count: int, seed: int) -> None:
        self._questions = asked_questions(False, count, seed)
        answers = ask("tiny-chat", self._questions, EngineConfig())
        self.right = self._marks(answers)
        chosen = list(zip(self._questions, answers, strict=True))[DIVERGED_QUESTIONS]
        with pipeline("tiny-chat", backend_config=EngineConfig()) as pipe:
            self._texts = [
                pipe.prepare_inputs(prompt_of(question))["input_ids"] + pipe.tokenizer.encode(answer, add_bos=False)
                for question, answer in chosen
            ]
            self._likely = list(self._log_probabilities(pipe))

    def _marks(self, answers: Sequence[str]) -> list[bool]:
        return [question.accepts(answer) for question, answer in zip(self._questions, answers, strict=True)]

    def _log_probabilities(self, pipe: Pipeline) -> Iterator[Tensor]:
        """Yield what a model says behind each token of each text, [tokens, vocab]."""
        for start in range(0, len(self._texts), BATCH_SIZE):
            texts = self._texts[start : start + BATCH_SIZE]
            for text, logits in zip(texts, pipe.get_logits(texts), strict=True):
                yield logits[: len(text)].log_softmax(-1)

    def figures(self, model: str, engine: EngineConfig) -> Figures:
        """Ask a model, and compare."""
        right = self._marks(ask(model, self._questions, engine))
        pairs = list(zip(self.right, right, strict=True))
        with pipeline(model, backend_config=engine) as pipe:
            parts = [
                (first.exp() * (first - second)).sum(-1)
                for first, second in zip(self._likely, self._log_probabilities(pipe), strict=True)
            ]
        return Figures(
            right=sum(right),
            lost=sum(before and not after for before, after in pairs),
            won=sum(after and not before for before, after in pairs),
            asked=len(right),
            divergence=float(torch.cat(parts).mean()),
        )


def complaints(figures: Mapping[str, Figures]) -> list[str]:
    """Return what lies outside of its bound."""
    plain = figures.get(PLAIN)
    found = []
    for name, of_row in figures.items():
        row = ROWS[name]
        if row.bound is not None and of_row.points > row.bound.points:
            found.append(f"{name} loses {of_row.points:.2f} points of {row.bound.points} allowed")
        if row.bound is not None and of_row.divergence > row.bound.divergence:
            found.append(f"{name} diverges by {of_row.divergence:.1e} of {row.bound.divergence:.1e} allowed")
        if row.part_of_plain and plain is not None and of_row.points > PLAIN_PART * plain.points:
            found.append(f"{name} loses {of_row.points:.2f} points, and plain rounding {plain.points:.2f}")
        if row.control and of_row.points < AT_LEAST:
            found.append(f"{name} loses {of_row.points:.2f} points, which shows that these questions tell nothing")
    return found


def folder_of(row: Row, folder: Path, made: dict[str, str]) -> str:
    """Return the checkpoint of a row, made if it is the first to need it."""
    if not row.tool:
        return "tiny-chat"
    key = f"{row.tool} {json.dumps(dict(row.options), sort_keys=True)}"
    if key not in made:
        made[key] = str(folder / str(len(made)))
        TOOLS[row.tool]("tiny-chat", made[key], **row.options)
    return made[key]


def line(name: str, figures: Figures) -> str:
    return (
        f"{name:28}{figures.right / figures.asked:8.1%}{-figures.points:+9.2f}"
        f"{figures.lost:7}{figures.won:7}{figures.divergence:12.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=list(ROWS), help="one row; may be given again (default: all)")
    parser.add_argument("--count", type=int, default=60, help="questions per skill (default: %(default)s)")
    parser.add_argument("--questions-seed", type=int, default=0, help="another seed, other questions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()

    reference = Reference(arguments.count, arguments.questions_seed)
    right, asked = sum(reference.right), len(reference.right)
    print(f"{'':28}{'right':>8}{'points':>9}{'lost':>7}{'won':>7}{'divergence':>12}")
    print(f"{'plain, float32':28}{right / asked:8.1%}", flush=True)
    figures: dict[str, Figures] = {}
    made: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.row or ROWS:
            model = folder_of(ROWS[name], Path(folder), made)
            figures[name] = reference.figures(model, EngineConfig.from_dict(dict(ROWS[name].config)).checked())
            print(line(name, figures[name]), flush=True)
    if arguments.json is not None:
        result = {"right": right, "asked": asked, "rows": {name: asdict(each) for name, each in figures.items()}}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if found := complaints(figures):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
