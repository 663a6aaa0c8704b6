"""Exact-answer accuracy of the training network on held-out questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from tokenizers import Tokenizer

from .network import Network
from .tokenizer import TURN_END

_TOKENS_PER_BATCH = 65_536


class Asked(Protocol):
    """A question with one right answer."""

    @property
    def skill(self) -> str: ...

    @property
    def prompt(self) -> str:
        """What stands before the answer, as the chat template renders it."""
        ...

    @property
    def answer(self) -> str: ...


@torch.no_grad()
def exact_answers(network: Network, tokenizer: Tokenizer, questions: Sequence[Asked]) -> list[bool]:
    """Whether greedy decoding would produce each answer and then end the turn.

    One forward pass over prompt and answer tells this: greedy decoding yields the answer if and only if
    every answer token is the most likely one after the tokens before it.
    """
    device = next(network.parameters()).device
    encoded = []
    for index, question in enumerate(questions):
        prompt = tokenizer.encode(question.prompt, add_special_tokens=False).ids
        answer = tokenizer.encode(question.answer + TURN_END, add_special_tokens=False).ids
        encoded.append((len(prompt) + len(answer), index, prompt, answer))
    encoded.sort()
    right = [False] * len(questions)
    start = 0
    while start < len(encoded):
        end = start + 1
        while end < len(encoded) and encoded[end][0] * (end + 1 - start) <= _TOKENS_PER_BATCH:
            end += 1
        batch = encoded[start:end]
        tokens = torch.zeros(len(batch), batch[-1][0], dtype=torch.long)
        for row, (length, _, prompt, answer) in enumerate(batch):
            tokens[row, :length] = torch.tensor(prompt + answer)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = network(tokens.to(device)).argmax(-1).cpu()
        for row, (length, index, prompt, answer) in enumerate(batch):
            right[index] = best[row, len(prompt) - 1 : length - 1].tolist() == answer
        start = end
    return right


def accuracy_by_skill(
    network: Network, tokenizer: Tokenizer, questions: Sequence[Asked]
) -> dict[str, tuple[int, float]]:
    """The number of questions and the share of exact answers for every skill, and for ``total``."""
    right = exact_answers(network, tokenizer, questions)
    groups: dict[str, list[bool]] = {}
    for question, value in zip(questions, right, strict=True):
        groups.setdefault(question.skill, []).append(value)
    groups["total"] = right
    return {skill: (len(values), sum(values) / len(values)) for skill, values in groups.items()}
