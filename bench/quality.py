"""Share of exactly right answers of a model, on held-out questions that `tiny-chat` was trained to answer.

    python bench/quality.py
    python bench/quality.py --json result.json
    python bench/quality.py --noise 0.05 --seed 0
    python bench/quality.py --config '{"quant_policy": 4}'
    python bench/quality.py --vision
    python bench/quality.py --tools

Each question has one right answer, which has to be met to the letter, greedily; a story only has to end as stories do
and to use no words from elsewhere. The skills are mixed, from some that a sound model never misses to some with thin
margins. `--noise` asks the same questions again of a copy of the model in which every weight was multiplied by
1 + noise * N(0, 1): if that made no difference, the questions could not tell a sound model from a damaged one.
`--vision` asks `tiny-vlm` about images, and what it has learned without them; it ends with exit code 1 if a skill falls
short of its goal. `--tools` offers tools: which calls are made, that none is made in vain, and what is said to the
results; it ends with exit code 1 if fewer than 95 % of the replies are right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, pipeline
from asyncllm.locate import locate

# The questions are those of the program that trains the model.
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from train_tiny_chat.noise import perturbed
from train_tiny_chat.questions import OPEN_SKILL, Question, held_out, quality_set
from train_tiny_chat.tool_conversation import ToolQuestion, tool_questions
from train_tiny_vlm.evaluation import text_questions, visual_questions
from train_tiny_vlm.skills import GOALS, VisualQuestion

MAX_NEW_TOKENS = 160
"""More than the longest right answer, so that only an answer that does not end is cut."""

TOOL_GOAL = 0.95

Accuracies = dict[str, tuple[int, int]]
"""Skill -> right answers, questions; the last is the total."""


def prompt_of(question: Question | VisualQuestion) -> Any:
    """A question as a pipeline takes it."""
    if isinstance(question, VisualQuestion):
        return question.question, list(question.images)
    return [dict(message) for message in question.messages]


def ask(model: str, questions: Sequence[Question | VisualQuestion], engine: EngineConfig) -> list[str]:
    """The answers of `model`, a name or folder."""
    config = GenerationConfig(top_k=1, max_new_tokens=MAX_NEW_TOKENS)
    with pipeline(model, backend_config=engine) as pipe:
        responses = pipe([prompt_of(question) for question in questions], config)
    assert isinstance(responses, list)  # as a list was asked
    return [response.text for response in responses]


async def ask_with_tools(
    model: str, questions: Sequence[ToolQuestion], engine: EngineConfig
) -> list[tuple[str, list[tuple[str, str]]]]:
    """The replies of `model`: the text, and the names and arguments of its calls."""
    config = GenerationConfig(top_k=1, max_new_tokens=MAX_NEW_TOKENS)
    async with AsyncEngine(model, engine) as llm:
        replies = await asyncio.gather(*(llm.generate(each.messages, config, tools=each.tools) for each in questions))
    return [(reply.text, [(call.name, call.arguments) for call in reply.tool_calls]) for reply in replies]


def count_right(questions: Sequence[Question | VisualQuestion | ToolQuestion], right: Sequence[bool]) -> Accuracies:
    """Right answers per skill, in the order of the questions."""
    marks: dict[str, list[bool]] = {}
    for question, mark in zip(questions, right, strict=True):
        marks.setdefault(question.skill, []).append(mark)
    marks["total"] = [mark for skill in marks.values() for mark in skill]
    return {skill: (sum(values), len(values)) for skill, values in marks.items()}


def write_perturbed(model: str, folder: Path, noise: float, seed: int) -> None:
    """A copy of the checkpoint in `folder`, each of its weights off by a random relative error."""
    shutil.copytree(locate(model), folder, dirs_exist_ok=True)
    for path in sorted(folder.glob("*.safetensors")):
        save_file(perturbed(load_file(path), noise, seed), path, metadata={"format": "pt"})


def measure(
    model: str, questions: Sequence[Question | VisualQuestion], of_tools: Sequence[ToolQuestion], engine: EngineConfig
) -> tuple[Accuracies, float]:
    """Right answers per skill, and the seconds that it took to load the model and to answer."""
    start = time.perf_counter()
    if of_tools:
        replies = asyncio.run(ask_with_tools(model, of_tools, engine))
        right = [question.accepts(*reply) for question, reply in zip(of_tools, replies, strict=True)]
        return count_right(of_tools, right), time.perf_counter() - start
    answers = ask(model, questions, engine)
    right = [question.accepts(answer) for question, answer in zip(questions, answers, strict=True)]
    return count_right(questions, right), time.perf_counter() - start


def print_table(columns: dict[str, Accuracies]) -> None:
    """One line for each skill."""
    print(f"{'skill':15}{'questions':>10}" + "".join(f"{name:>14}" for name in columns))
    for skill, (_, asked) in next(iter(columns.values())).items():
        shares = (accuracies[skill][0] / asked for accuracies in columns.values())
        print(f"{skill:15}{asked:10}" + "".join(f"{share:14.1%}" for share in shares))


def asked_questions(vision: bool, count: int, seed: int) -> list[Question | VisualQuestion]:
    """The questions of a run, so many of each skill."""
    if vision:
        return [*visual_questions(count, seed), *text_questions(count, seed)]
    return [*quality_set(count, seed), *held_out(OPEN_SKILL, count, seed)]


def missed_goals(accuracies: Accuracies) -> list[str]:
    """The skills of images that fall short of their goals."""
    shares = {skill: right / asked for skill, (right, asked) in accuracies.items()}
    return [skill for skill, goal in GOALS.items() if shares[skill] < goal]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: tiny-chat, with --vision tiny-vlm)")
    parser.add_argument("--vision", action="store_true", help="ask about images")
    parser.add_argument("--tools", action="store_true", help="offer tools")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--count", type=int, default=60, help="questions per skill (default: %(default)s)")
    parser.add_argument("--questions-seed", type=int, default=0, help="another seed, other questions")
    parser.add_argument("--noise", type=float, default=0.0, help="also measure a copy with this relative weight noise")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()

    engine = EngineConfig.from_dict(json.loads(arguments.config)).checked()
    model = arguments.model or ("tiny-vlm" if arguments.vision else "tiny-chat")
    asked = (arguments.count, arguments.questions_seed)
    questions = [] if arguments.tools else asked_questions(arguments.vision, *asked)
    of_tools = tool_questions(*asked) if arguments.tools else []
    columns: dict[str, Accuracies] = {}
    seconds: dict[str, float] = {}
    columns["accuracy"], seconds["accuracy"] = measure(model, questions, of_tools, engine)
    if arguments.noise:
        name = f"noise {arguments.noise:g}"
        with tempfile.TemporaryDirectory() as folder:
            write_perturbed(model, Path(folder), arguments.noise, arguments.seed)
            columns[name], seconds[name] = measure(folder, questions, of_tools, engine)
    print_table(columns)
    if arguments.json is not None:
        figures: dict[str, Any] = {
            "model": model,
            "config": json.loads(arguments.config),
            "count": arguments.count,
            "questions_seed": arguments.questions_seed,
            "noise": arguments.noise,
            "noise_seed": arguments.seed,
            "seconds": seconds,
            "right_and_asked": columns,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if arguments.vision and (missed := missed_goals(columns["accuracy"])):
        sys.exit(f"short of the goal: {', '.join(missed)}")
    right, total = columns["accuracy"]["total"]
    if arguments.tools and right < TOOL_GOAL * total:
        sys.exit("short of the goal")


if __name__ == "__main__":
    main()
