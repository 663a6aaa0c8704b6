"""Held-out questions with exact answers, drawn from the same skills that the model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .conversation import (
    SKILLS,
    UPPER_CASE_SKILLS,
    UPPER_CASE_SYSTEM_PROMPTS,
    Message,
    render_prompt,
    turns_of,
)
from .exchange import draw
from .stories import is_story

EASY_SKILLS = (
    "sum",
    "difference",
    "division",
    "compare",
    "passkey",
    "copy",
    "reverse",
    "count",
    "name_recall",
    "recall",
    "world",
    "follow_up",
    "small_talk",
    "out_of_scope",
    "upper_case",
    "many_turns",
)
HARD_SKILLS = (
    "product",
    "long_sum",
    "many_sum",
    "digit_sum",
    "lookup",
    "long_reverse",
    "sort",
    "spell",
    "letters",
    "count_many",
    "tally",
    "most_frequent",
    "museum",
)
LONG_SKILLS = ("long_passkey",)
OPEN_SKILL = "story"

SENSITIVE_SKILLS = ("tally", "many_sum", "long_sum")

LONGEST_OF = {"tally": 8, "many_sum": 8, "digit_sum": 8, "long_sum": 8, "letters": 4, "spell": 4}
"""Skills whose longest questions are asked: of so many draws the longest is kept.

Answers that add up many small parts have thin margins, so these questions notice a slight damage of the
weights or of the arithmetic that short ones survive.
"""

ROOM = 900
"""Tokens that an ordinary question may fill."""

LONG_ROOM = 1900
"""Tokens that a long-context question may fill."""


@dataclass(frozen=True)
class Question:
    """Chat messages that end with a user turn, and the only right answer.

    Of a story, ``answer`` is one of many good ones.
    """

    messages: list[Message]
    answer: str
    skill: str

    @property
    def prompt(self) -> str:
        """The question as the chat template renders it, up to where the answer begins."""
        return "<|bos|>" + "".join(render_prompt(message) for message in self.messages) + "<|im_start|>assistant\n"

    def accepts(self, answer: str) -> bool:
        """Whether ``answer`` is right to the letter, or is a whole story if one was asked for."""
        if self.skill == OPEN_SKILL:
            return is_story(self.messages[-1]["content"], answer)
        return answer == self.answer


def _messages(system: str | None, turns: list[tuple[str, str]]) -> list[Message]:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages[:-1]


def _question(skill: str, random: Random) -> Question:
    room = LONG_ROOM if skill in LONG_SKILLS else ROOM
    if skill == "upper_case":
        exchange = draw(SKILLS[random.choice(UPPER_CASE_SKILLS)], random, room, held_out=True)
        turns = [(question, answer.upper()) for question, answer in turns_of(exchange, random, room)]
        return Question(_messages(random.choice(UPPER_CASE_SYSTEM_PROMPTS), turns), turns[-1][1], skill)
    if skill == "many_turns":
        turns = []
        for name in random.choices(EASY_SKILLS[:-2], k=random.randint(3, 7)):
            exchange = draw(SKILLS[name], random, room // 8, held_out=True)
            turns += turns_of(exchange, random, room // 8)
        return Question(_messages(None, turns), turns[-1][1], skill)
    draws = [draw(SKILLS[skill], random, room, held_out=True) for _ in range(LONGEST_OF.get(skill, 1))]
    exchange = max(draws, key=lambda candidate: len(candidate.content))
    turns = turns_of(exchange, random, room)
    system = "You are a helpful assistant." if random.random() < 0.2 else None
    return Question(_messages(system, turns), turns[-1][1], skill)


def held_out(skill: str, count: int, seed: int) -> list[Question]:
    """Returns ``count`` different held-out questions of one skill; the same seed gives the same list."""
    random = Random(f"{skill}/{seed}")
    questions: list[Question] = []
    seen: set[str] = set()
    while len(questions) < count:
        question = _question(skill, random)
        key = "\n".join(message["content"] for message in question.messages)
        if key not in seen:
            seen.add(key)
            questions.append(question)
    return questions


def quality_set(count: int, seed: int) -> list[Question]:
    """All questions with one right answer: ``count`` of each skill, twice that of the sensitive skills.

    Questions that fill the context are few, as each costs as much as a hundred others.
    """
    counts = {skill: 2 * count if skill in SENSITIVE_SKILLS else count for skill in EASY_SKILLS + HARD_SKILLS}
    counts |= {skill: max(1, count // 4) for skill in LONG_SKILLS}
    return [question for skill, number in counts.items() for question in held_out(skill, number, seed)]
