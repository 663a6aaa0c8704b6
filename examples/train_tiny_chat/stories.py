"""Short stories put together from parts, and lines of plain text."""

from __future__ import annotations

import re
from random import Random

from .exchange import Exchange
from .lexicon import (
    ADJECTIVES,
    ANIMALS,
    COMMON_WORDS,
    FIRST_NAMES,
    FOODS,
    HEROES,
    NOUNS,
    PLACE_PHRASES,
    TIME_PHRASES,
    made_up_word,
    pick,
)

_ASK = (
    "Tell me a story.",
    "tell me a story",
    "Tell me a story!",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Tell me a short story.",
    "I would like to hear a story.",
    "Tell me another story.",
    "Write a story.",
    "story please",
)
_ASK_ABOUT = (
    "Tell me a story about a {h}.",
    "tell me a story about a {h}",
    "Can you tell me a story about a {h}?",
    "Write a story about a {h}.",
    "Do you know a story about a {h}?",
    "Write a short story about a {h}.",
    "Tell me a short story about a {h}.",
    "a story about a {h} please",
)
_OPENING = (
    "Once upon a time there was a {a} {h} called {n}.",
    "Long ago a {a} {h} called {n} lived {p}.",
    "There once was a {h} called {n}, and {n} was very {a}.",
    "In a small village lived a {a} {h} whose name was {n}.",
)
_WISH = (
    "{n} wanted to find a {b} {o}.",
    "More than anything, {n} wished for a {b} {o}.",
    "{t} {n} dreamed of a {b} {o}.",
    "{n} had lost a {b} {o} and looked for it everywhere.",
)
_MEETING = (
    "{p} {n} met a {c} {g}.",
    "A {c} {g} came along {t}.",
    "Then {n} saw a {c} {g} {p}.",
    "On the way {n} found a {c} {g} asleep {p}.",
)
_TALK = (
    '"Have you seen my {o}?" asked {n}. "No," said the {g}, "but I will help you."',
    '"Will you help me?" asked {n}. "Yes," said the {g}, "if you give me some {f}."',
    '"I am hungry," said the {g}. So {n} shared the {f}.',
    '"Come with me," said the {g}, and they walked all day.',
)
_TROUBLE = (
    "Then it began to rain, and the road was gone.",
    "But the bridge was broken, and the water was deep.",
    "Suddenly it was dark, and {n} was afraid.",
    "A cold wind blew, and they had to hide {p}.",
    "They were tired, but they did not stop.",
)
_TURN = (
    "The {g} had a good idea and lit a lamp.",
    "{n} was brave and went first.",
    "They made a small fire and waited.",
    "The {g} knew a hidden path {p}.",
    "Together they built a boat out of wood.",
)
_ENDING = (
    "In the end they found the {b} {o} {p}, and everyone was happy. The end.",
    "There it was: the {b} {o}! They laughed and went home. The end.",
    "From that day on {n} and the {g} were friends. The end.",
    "They never found the {o}, but they had found a friend. The end.",
    "{n} came home with the {b} {o} and told everyone about it. The end.",
)


def story_text(random: Random, hero: str | None = None) -> str:
    """A story of five to nine sentences that closes with ``The end.``."""
    values = {
        "a": random.choice(ADJECTIVES),
        "b": random.choice(ADJECTIVES),
        "c": random.choice(ADJECTIVES),
        "h": hero or random.choice(ANIMALS),
        "n": random.choice(FIRST_NAMES),
        "o": random.choice(NOUNS),
        "g": random.choice(ANIMALS),
        "f": random.choice(FOODS),
    }
    lines = []
    for part in (_OPENING, _WISH, _MEETING, _TALK, _TROUBLE, _TURN, _ENDING):
        if part in (_TROUBLE, _TURN) and random.random() < 0.25:
            continue
        line = pick(random, part, p=random.choice(PLACE_PHRASES), t=random.choice(TIME_PHRASES), **values)
        lines.append(line[0].upper() + line[1:])
    return " ".join(lines)


def story(random: Random, room: int) -> Exchange:
    """A story, sometimes about a wanted animal; it has no single right text."""
    if random.random() < 0.4:
        hero = random.choice(random.choice((ANIMALS, ANIMALS, HEROES, NOUNS, COMMON_WORDS)))
        if random.random() < 0.1:
            hero = made_up_word(random)
        return Exchange("story", pick(random, _ASK_ABOUT, h=hero), story_text(random, hero), hero, exact=False)
    return Exchange("story", random.choice(_ASK), story_text(random), "story", exact=False)


def _words_in(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


_STORY_WORDS = _words_in(
    " ".join(
        (
            *_OPENING,
            *_WISH,
            *_MEETING,
            *_TALK,
            *_TROUBLE,
            *_TURN,
            *_ENDING,
            *ADJECTIVES,
            *ANIMALS,
            *HEROES,
            *COMMON_WORDS,
            *FIRST_NAMES,
            *FOODS,
            *NOUNS,
            *PLACE_PHRASES,
            *TIME_PHRASES,
        )
    )
)


def is_story(question: str, text: str) -> bool:
    """Whether ``text`` ends as stories do and has no word that neither stories nor the question use."""
    return text.endswith("The end.") and _words_in(text) <= _STORY_WORDS | _words_in(question)
