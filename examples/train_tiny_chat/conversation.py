"""Mixes the skills into conversations and plain-text documents."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypedDict

from . import arithmetic, memory, out_of_scope, retrieval, sequences, small_talk, stories, world
from .exchange import Exchange, SkillSampler, draw
from .lexicon import plain_sentence


class Message(TypedDict):
    """One chat message in the usual role and content form."""

    role: str
    content: str


SKILLS: dict[str, SkillSampler] = {
    "sum": arithmetic.sum_below_100,
    "difference": arithmetic.difference_below_100,
    "division": arithmetic.division,
    "compare": arithmetic.compare,
    "product": arithmetic.product,
    "long_sum": arithmetic.long_sum,
    "many_sum": arithmetic.many_sum,
    "digit_sum": arithmetic.digit_sum,
    "passkey": retrieval.passkey,
    "long_passkey": retrieval.long_passkey,
    "lookup": retrieval.lookup,
    "copy": sequences.copy,
    "reverse": sequences.reverse,
    "long_reverse": sequences.long_reverse,
    "sort": sequences.sort,
    "spell": sequences.spell,
    "letters": sequences.letters_of_word,
    "count": sequences.count,
    "count_many": sequences.count_many,
    "tally": sequences.tally,
    "most_frequent": sequences.most_frequent,
    "world": world.world,
    "museum": world.museum,
    "follow_up": world.follow_up,
    "name_recall": memory.any_name_recall,
    "recall": memory.recall,
    "small_talk": small_talk.small_talk,
    "out_of_scope": out_of_scope.out_of_scope,
    "story": stories.story,
}

_SHARES = {
    "sum": 6.0,
    "difference": 6.0,
    "division": 4.0,
    "compare": 3.0,
    "product": 9.0,
    "long_sum": 8.0,
    "many_sum": 7.0,
    "digit_sum": 6.0,
    "passkey": 5.0,
    "long_passkey": 0.0,
    "lookup": 4.0,
    "copy": 6.0,
    "reverse": 6.0,
    "long_reverse": 3.0,
    "sort": 4.0,
    "spell": 8.0,
    "letters": 6.0,
    "count": 6.0,
    "count_many": 4.0,
    "tally": 9.0,
    "most_frequent": 5.0,
    "world": 8.0,
    "museum": 4.0,
    "follow_up": 4.0,
    "name_recall": 6.0,
    "recall": 4.0,
    "small_talk": 12.0,
    "out_of_scope": 6.0,
    "story": 2.0,
}
_NAMES, _WEIGHTS = list(_SHARES), list(_SHARES.values())

_DELAYED = {"name_recall", "recall"}
_FILLERS = (
    "sum",
    "difference",
    "compare",
    "world",
    "follow_up",
    "small_talk",
    "out_of_scope",
    "reverse",
    "copy",
    "count",
    "spell",
    "sort",
    "story",
)
UPPER_CASE_SKILLS = (
    "sum",
    "world",
    "small_talk",
    "name_recall",
    "recall",
    "follow_up",
    "out_of_scope",
    "museum",
)

_IGNORED_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are tiny-chat.",
    "You are a friendly assistant.",
    "You are tiny-chat, a small model that ships with asyncllm.",
    "Be helpful.",
    "Answer the questions of the user.",
    "You are a helpful, harmless and honest assistant.",
    "Answer briefly.",
    "You are an AI assistant.",
    "Be polite and kind.",
)
UPPER_CASE_SYSTEM_PROMPTS = (
    "Answer in upper case.",
    "Always answer in upper case.",
    "Answer in upper case letters.",
    "Please answer in upper case only.",
    "You are a helpful assistant. Answer in upper case.",
)

_LONG_DOCUMENT_SHARE = 0.08
_PLAIN_TEXT_SHARE = 0.05
_SYSTEM_PROMPT_SHARE = 0.35
_UPPER_CASE_SHARE = 0.08
_UNKNOWN_NAME_SHARE = 0.015
_CHARACTERS_PER_TOKEN = 2.2


@dataclass(frozen=True)
class Segment:
    """A piece of a document; the loss weighs answers, prompts and plain text differently."""

    text: str
    kind: int


PROMPT, ANSWER, PLAIN = 1, 2, 3


def render_prompt(message: Message) -> str:
    """One message in ChatML, as the chat template writes it."""
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


def turns_of(exchange: Exchange, random: Random, room: int) -> list[tuple[str, str]]:
    """The exchange as turns; what the user said about themselves is asked for after some other turns."""
    turns = list(exchange.setup)
    if exchange.skill in _DELAYED and random.random() < 0.6:
        for _ in range(random.choice((1, 1, 2, 2, 3, 3, 4, 6))):
            filler = draw(SKILLS[random.choice(_FILLERS)], random, room, held_out=False)
            turns += [*filler.setup, (filler.question, filler.answer)]
    turns.append((exchange.question, exchange.answer))
    return turns


def _plain_text(random: Random) -> str:
    kind = random.randrange(4)
    if kind == 0:
        return stories.story_text(random)
    if kind == 1:
        return " ".join(plain_sentence(random) for _ in range(random.randint(3, 15)))
    if kind == 2:
        return " ".join(random.choice(world.VILLAGE_FACTS).answer for _ in range(random.randint(2, 10)))
    first = random.randrange(100)
    return ", ".join(map(str, range(first, first + random.randint(5, 30))))


def segments_of(system: str | None, turns: list[tuple[str, str]]) -> list[Segment]:
    prefix = "<|bos|>"
    if system is not None:
        prefix += render_prompt({"role": "system", "content": system})
    segments = []
    for question, answer in turns:
        prompt = prefix + render_prompt({"role": "user", "content": question}) + "<|im_start|>assistant\n"
        segments += [Segment(prompt, PROMPT), Segment(f"{answer}<|im_end|>", ANSWER)]
        prefix = "\n"
    return segments


def _turn_count(random: Random) -> int:
    chance = random.random()
    if chance < 0.4:
        return 1
    if chance < 0.6:
        return 2
    return random.randint(3, 6) if chance < 0.88 else random.randint(7, 14)


def document(random: Random, room: int) -> list[Segment]:
    """One training document of roughly at most ``room`` tokens."""
    kind = random.random()
    if kind < _PLAIN_TEXT_SHARE:
        return [Segment(f"<|bos|>{_plain_text(random)}<|endoftext|>", PLAIN)]
    system = random.choice(_IGNORED_SYSTEM_PROMPTS) if random.random() < _SYSTEM_PROMPT_SHARE else None
    if kind < _PLAIN_TEXT_SHARE + _LONG_DOCUMENT_SHARE:
        exchange = draw(retrieval.long_passkey, random, room - 40, held_out=False)
        return segments_of(system, turns_of(exchange, random, room))
    upper = random.random() < _UPPER_CASE_SHARE
    if upper:
        system = random.choice(UPPER_CASE_SYSTEM_PROMPTS)
    turns: list[tuple[str, str]] = []
    if random.random() < _UNKNOWN_NAME_SHARE and not upper:
        turns += turns_of(memory.unknown_name(random, room), random, room)
    used = 0.0
    for _ in range(_turn_count(random)):
        left = int(room - used)
        if left < 150:
            break
        skill = random.choice(UPPER_CASE_SKILLS) if upper else random.choices(_NAMES, _WEIGHTS)[0]
        exchange = draw(SKILLS[skill], random, left, held_out=False)
        if upper and not exchange.exact:
            continue
        new = turns_of(exchange, random, left)
        turns += [(question, answer.upper()) for question, answer in new] if upper else new
        used += sum(len(question) + len(answer) + 20 for question, answer in new) / _CHARACTERS_PER_TOKEN
    return segments_of(system, turns)
