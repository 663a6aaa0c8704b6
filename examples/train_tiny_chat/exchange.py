"""One question with its answer, and the rule that keeps held-out questions out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HELD_OUT_PERCENT = 10


@dataclass(frozen=True)
class Exchange:
    """A user question and the assistant's answer, with the turns that must come before it.

    ``content`` names what is asked rather than how: two paraphrases of ``17 + 25`` share it, so that
    the hold-out rule cannot leak an answer through another phrasing. ``exact`` is false for replies
    that have no single right answer, such as stories.
    """

    skill: str
    question: str
    answer: str
    content: str
    setup: tuple[tuple[str, str], ...] = ()
    exact: bool = True


SkillSampler = Callable[[Random, int], Exchange]
"""Draws an exchange; the integer is the number of tokens that the exchange may fill."""


def is_held_out(exchange: Exchange) -> bool:
    """Whether the exchange belongs to the evaluation set, decided by a hash of its content."""
    return held_out_by(exchange.skill, exchange.content)


def held_out_by(skill: str, content: str) -> bool:
    """Whether what has this content belongs to the evaluation set."""
    digest = hashlib.blake2b(f"{skill}|{content}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def draw(sampler: SkillSampler, random: Random, room: int, held_out: bool) -> Exchange:
    """Draws until the exchange lies on the wanted side of the hold-out rule."""
    while True:
        exchange = sampler(random, room)
        if not exchange.exact or is_held_out(exchange) == held_out:
            return exchange
