"""Exact-answer accuracy of the training network on held-out questions about images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny_chat.card import Accuracies
from train_tiny_chat.evaluation import accuracy_by_skill as text_accuracy
from train_tiny_chat.questions import Question, held_out

from .export import MEAN, STD
from .network import VisionNetwork
from .scenes import model_picture
from .skills import SKILLS, TWO_IMAGES, VisualQuestion, held_out_questions
from .tokenizer import IMAGE

TEXT_SKILLS = ("sum", "difference", "compare", "copy", "reverse", "count", "name_recall", "world", "small_talk")
"""Skills of ``tiny-chat`` that the smaller text network keeps."""

_BATCH = 128


def visual_questions(count: int, seed: int) -> list[VisualQuestion]:
    """Returns ``count`` held-out questions of each skill."""
    return [question for skill in (*SKILLS, TWO_IMAGES) for question in held_out_questions(skill, count, seed)]


def text_questions(count: int, seed: int) -> list[Question]:
    """Returns ``count`` held-out questions without images of each skill, asked of ``tiny-vlm`` by its name."""
    return [
        replace(
            question,
            messages=[
                {"role": message["role"], "content": message["content"].replace("tiny-chat", "tiny-vlm")}
                for message in question.messages
            ],
            answer=question.answer.replace("tiny-chat", "tiny-vlm"),
            skill=f"text: {skill}",
        )
        for skill in TEXT_SKILLS
        for question in held_out(skill, count, seed)
    ]


def normalized(pixels: Tensor) -> Tensor:
    """pixels uint8 [images, side, side, 3] -> float [images, 3, side, side], as the tower reads them."""
    mean, std = (torch.tensor(values, device=pixels.device) for values in (MEAN, STD))
    return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)


@torch.no_grad()
def exact_answers(network: VisionNetwork, tokenizer: Tokenizer, questions: Sequence[VisualQuestion]) -> list[bool]:
    """Whether greedy decoding would produce each answer and then end the turn.

    One forward pass over prompt and answer tells this, as in ``train_tiny_chat.evaluation``.
    """
    device = next(network.parameters()).device
    right = []
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        encoded = []
        for question in batch:
            shown = f"{IMAGE * network.tower_shape.tokens}\n" * len(question.images)
            text = f"<|bos|><|im_start|>user\n{shown}{question.question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(text, add_special_tokens=False).ids
            encoded.append((prompt, tokenizer.encode(f"{question.answer}<|im_end|>", add_special_tokens=False).ids))
        tokens = torch.zeros(len(batch), max(len(prompt) + len(answer) for prompt, answer in encoded), dtype=torch.long)
        for row, (prompt, answer) in enumerate(encoded):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        pictures = [np.asarray(model_picture(image)) for question in batch for image in question.images]
        pixels = normalized(torch.from_numpy(np.stack(pictures)).to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = network(tokens.to(device), pixels).argmax(-1).cpu()
        right += [
            best[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer
            for row, (prompt, answer) in enumerate(encoded)
        ]
    return right


def accuracies(
    network: VisionNetwork, tokenizer: Tokenizer, visual: Sequence[VisualQuestion], text: Sequence[Question]
) -> Accuracies:
    """The number of questions and the share of exact answers of every skill, those without images last."""
    groups: dict[str, list[bool]] = {}
    for question, value in zip(visual, exact_answers(network, tokenizer, visual), strict=True):
        groups.setdefault(question.skill, []).append(value)
    shares = {skill: (len(values), sum(values) / len(values)) for skill, values in groups.items()}
    of_text = text_accuracy(network.language_model, tokenizer, text)
    return shares | {skill: share for skill, share in of_text.items() if skill != "total"}
