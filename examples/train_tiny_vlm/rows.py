"""Rows of training: conversations about one image or two, and packed text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from train_tiny_chat.packing import Kinds, Tokens, pack

from .scenes import MOST_SHAPES, Scene, draw_scene, model_picture, picture
from .skills import SKILLS, Answered, two_images
from .tokenizer import IMAGE

LENGTH = 256
"""Tokens of a row."""

ONE_IMAGE, TWO_IMAGES, TEXT = 12, 3, 5
"""Rows of each kind in a unit; every batch has the same mixture, so that its shapes never change."""

UNIT = ONE_IMAGE + TWO_IMAGES + TEXT
IMAGES_PER_UNIT = ONE_IMAGE + 2 * TWO_IMAGES

_SHARES = {
    "count": 3.0,
    "count_by_colour": 3.0,
    "count_by_kind": 2.0,
    "count_by_both": 2.0,
    "colour_of": 4.0,
    "shape_of": 4.0,
    "is_there": 1.0,
    "describe": 2.0,
}
_NAMES, _WEIGHTS = list(_SHARES), list(_SHARES.values())
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are tiny-vlm.",
    "Answer briefly.",
    "You are a friendly assistant.",
    "Answer the questions of the user.",
)
_PROMPT, _ANSWER = 1, 2
_TRIES = 30

Pixels = npt.NDArray[np.uint8]


@dataclass
class Batches:
    """Rows in units of ``UNIT``: tokens and kinds [rows, length], pixels [images, side, side, 3] in their order."""

    tokens: Tokens
    kinds: Kinds
    pixels: Pixels


@dataclass
class Filed:
    """Batches whose pixels lie in a file, as pipes between processes are too slow for them."""

    tokens: Tokens
    kinds: Kinds
    path: Path

    def load(self) -> Batches:
        """Reads the pixels and removes the file."""
        pixels: Pixels = np.load(self.path)
        self.path.unlink()
        return Batches(self.tokens, self.kinds, pixels)


class _Row:
    """A row that is being written."""

    def __init__(self, tokenizer: Tokenizer, random: Random, image_length: int) -> None:
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self._encoded = cache(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self._image = [tokenizer.token_to_id(IMAGE)] * image_length
        self._random = random

    def begin(self) -> None:
        """Begins another row, one time in seven with a system prompt."""
        self.tokens, self.kinds = [], []
        self._prefix = "<|bos|>"
        if self._random.random() < 0.15:
            self._prefix += f"<|im_start|>system\n{self._random.choice(_SYSTEM_PROMPTS)}<|im_end|>\n"

    def add(self, asked: Answered, images: int) -> bool:
        """Adds a turn behind so many images; false if there is no room for it."""
        between: list[int] = []
        for _ in range(images):
            between += [*self._image, *self._encoded("\n")]
        head = self._encoded(f"{self._prefix}<|im_start|>user\n")
        question, tail = self._encoded(asked.question), self._encoded("<|im_end|>\n<|im_start|>assistant\n")
        # Now and then a user puts the images behind the text.
        behind = bool(images) and self._random.random() < 0.1
        prompt = [*head, *question, *between, *tail] if behind else [*head, *between, *question, *tail]
        answer = self._encoded(f"{asked.answer}<|im_end|>")
        if len(self.tokens) + len(prompt) + len(answer) > LENGTH:
            return False
        self.tokens += [*prompt, *answer]
        self.kinds += [_PROMPT] * len(prompt) + [_ANSWER] * len(answer)
        self._prefix = "\n"
        return True


def _ask(random: Random, scene: Scene) -> Answered:
    while True:
        asked = SKILLS[random.choices(_NAMES, _WEIGHTS)[0]](random, scene)
        if asked is not None:
            return asked


def _fill(row: _Row, random: Random, scene: Scene, images: int, turns: int) -> None:
    """Adds turns about a scene; the first shows its image.

    Nothing is asked that an earlier answer tells: a description ends the turns, and no answer is given twice.
    """
    seen: set[str] = set()
    for _ in range(_TRIES):
        asked = _ask(random, scene)
        if asked.answer not in seen:
            seen.add(asked.answer)
            if not row.add(asked, images) or len(seen) == turns or asked.answer.startswith("I see"):
                return
            images = 0


def _one_image(row: _Row, random: Random, most: int) -> tuple[Scene, ...]:
    scene = draw_scene(random, most, held_out=False)
    row.begin()
    _fill(row, random, scene, 1, _TRIES)
    return (scene,)


def _two_images(row: _Row, random: Random, most: int) -> tuple[Scene, ...]:
    first, second = draw_scene(random, most, held_out=False), draw_scene(random, most, held_out=False)
    row.begin()
    if random.random() < 0.2:
        # The second image comes with a later turn, and from then on is the one that is meant.
        _fill(row, random, first, 1, random.randint(1, 2))
        _fill(row, random, second, 1, _TRIES)
        return first, second
    images = 2
    seen: set[str] = set()
    for _ in range(_TRIES):
        asked = two_images(random, (first, second))
        if asked is not None and asked.question not in seen:
            seen.add(asked.question)
            if not row.add(asked, images):
                break
            images = 0
    return first, second


def make_batches(tokenizer: Tokenizer, seed: str, units: int, image_length: int, most: int = MOST_SHAPES) -> Batches:
    """Builds rows of conversations whose scenes have at most ``most`` shapes; no held-out set of shapes is shown."""
    random = Random(seed)
    rows = units * UNIT
    tokens, kinds = np.zeros((rows, LENGTH), np.uint16), np.zeros((rows, LENGTH), np.uint8)
    pixels: list[Pixels] = []
    row = _Row(tokenizer, random, image_length)
    text_tokens, text_kinds = pack(tokenizer, f"{seed}/text", units * TEXT, LENGTH, "tiny-vlm")
    for unit in range(units):
        start = unit * UNIT
        for index in range(ONE_IMAGE + TWO_IMAGES):
            scenes = (_one_image if index < ONE_IMAGE else _two_images)(row, random, most)
            tokens[start + index, : len(row.tokens)] = row.tokens
            kinds[start + index, : len(row.kinds)] = row.kinds
            pixels += [np.asarray(model_picture(picture(scene, random))) for scene in scenes]
        text = slice(start + ONE_IMAGE + TWO_IMAGES, start + UNIT)
        tokens[text] = text_tokens[unit * TEXT : (unit + 1) * TEXT]
        kinds[text] = text_kinds[unit * TEXT : (unit + 1) * TEXT]
    return Batches(tokens, kinds, np.stack(pixels))


def file_batches(tokenizer: Tokenizer, seed: str, units: int, image_length: int, most: int, folder: Path) -> Filed:
    """Builds batches and writes their pixels into the folder."""
    batches = make_batches(tokenizer, seed, units, image_length, most)
    path = folder / f"{seed.replace('/', '-')}.npy"
    np.save(path, batches.pixels)
    return Filed(batches.tokens, batches.kinds, path)
