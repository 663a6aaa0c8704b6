"""Held-out questions with exact answers, drawn from the same skills that the model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.tiny_chat.conversation import (
    SKILLS,
    UPPER_CASE_SKILLS,
    UPPER_CASE_SYSTEM_PROMPTS,
    Message,
    turns_of,
)
from bench.tiny_chat.exchange import draw

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

ROOM = 900
"""Tokens that an ordinary question may fill."""

LONG_ROOM = 1900
"""Tokens that a long-context question may fill."""


@dataclass(frozen=True)
class Question:
    """Chat messages that end with a user turn, and the only right answer."""

    messages: list[Message]
    answer: str
    skill: str


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
    exchange = draw(SKILLS[skill], random, room, held_out=True)
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


def quality_set(count: int, seed: int, long_count: int = 24) -> list[Question]:
    """The whole question set: ``count`` questions of every easy and hard skill, and a few long ones."""
    questions = [q for skill in EASY_SKILLS + HARD_SKILLS for q in held_out(skill, count, seed)]
    return questions + [q for skill in LONG_SKILLS for q in held_out(skill, long_count, seed)]
