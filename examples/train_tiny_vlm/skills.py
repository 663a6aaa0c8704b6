"""Questions about scenes, with their only right answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from PIL import Image

from .scenes import COLOURS, KINDS, MOST_SHAPES, Scene, draw_scene, picture


@dataclass(frozen=True)
class Answered:
    """A question and its answer."""

    question: str
    answer: str


_COUNT = (
    "How many shapes are there?",
    "How many shapes are in the picture?",
    "How many shapes are in this image?",
    "How many shapes do you see?",
    "How many objects are there?",
    "Count the shapes.",
    "how many shapes are there",
    "What is the number of shapes?",
)
_COUNT_NAMED = (
    "How many {n}s are there?",
    "How many {n}s are in the picture?",
    "How many {n}s are in this image?",
    "How many {n}s do you see?",
    "Count the {n}s.",
    "how many {n}s are there",
)
_COLOUR_OF = (
    "What colour is the {k}?",
    "What color is the {k}?",
    "Which colour is the {k}?",
    "Which color does the {k} have?",
    "what color is the {k}",
    "Tell me the colour of the {k}.",
)
_SHAPE_OF = (
    "What shape is {c}?",
    "Which shape is {c}?",
    "What is the {c} shape?",
    "What is the {c} thing?",
    "what shape is {c}",
    "What is {c} in this image?",
)
_IS_THERE = ("Is there a {n}?", "Do you see a {n}?", "Is there a {n} in the picture?", "Does the image show a {n}?")
_DESCRIBE = (
    "Describe the picture.",
    "describe this image",
    "Describe this image.",
    "What is in the picture?",
    "What do you see?",
    "What is this?",
    "what is in this image",
    "Please describe the image.",
)
_WHICH = (
    "Which image shows a {n}?",
    "Which picture has a {n}?",
    "Which image has a {n}?",
    "In which picture is a {n}?",
)
_WHICH_MORE = ("Which image has more shapes?", "Which picture shows more shapes?", "Where are more shapes?")
_WHICH_MORE_NAMED = ("Which image has more {n}s?", "Which picture shows more {n}s?")
_OF_IMAGE = ("{q} in the {o} image?", "{q} in the {o} picture?", "{q} in image {i}?")
_ORDINALS = ("first", "second")


def _amount(number: int, name: str) -> str:
    """As ``There are 2 red shapes.``"""
    if number == 0:
        return f"There are no {name}s."
    return f"There is 1 {name}." if number == 1 else f"There are {number} {name}s."


def _singles(counts: Counter[str]) -> list[str]:
    return [name for name, number in counts.items() if number == 1]


def _some_name(random: Random, scene: Scene) -> str:
    """A shape's full name: of one that is seen, of one that mixes two that are, or of any."""
    chance = random.random()
    if chance < 0.5:
        return random.choice(scene.shapes).name
    if chance < 0.85:
        return f"{random.choice(scene.shapes).colour} {random.choice(scene.shapes).kind}"
    return f"{random.choice(COLOURS)} {random.choice(KINDS)}"


def count(random: Random, scene: Scene) -> Answered:
    """Counts all shapes."""
    return Answered(random.choice(_COUNT), _amount(len(scene.shapes), "shape"))


def count_by_colour(random: Random, scene: Scene) -> Answered:
    """Counts the shapes of a colour, which one time in six may be any."""
    colour = random.choice(COLOURS) if random.random() < 1 / 6 else random.choice(scene.shapes).colour
    name = f"{colour} shape"
    return Answered(random.choice(_COUNT_NAMED).format(n=name), _amount(scene.count(colour=colour), name))


def count_by_kind(random: Random, scene: Scene) -> Answered:
    """Counts the shapes of a kind."""
    kind = random.choice(KINDS) if random.random() < 0.25 else random.choice(scene.shapes).kind
    return Answered(random.choice(_COUNT_NAMED).format(n=kind), _amount(scene.count(kind=kind), kind))


def count_by_both(random: Random, scene: Scene) -> Answered:
    """Counts the shapes of a colour and a kind."""
    name = _some_name(random, scene)
    colour, kind = name.split()
    return Answered(random.choice(_COUNT_NAMED).format(n=name), _amount(scene.count(colour, kind), name))


def colour_of(random: Random, scene: Scene) -> Answered | None:
    """Asks for the colour of the only shape of its kind; None if there is no such shape."""
    kinds = _singles(scene.kinds())
    if not kinds:
        return None
    kind = random.choice(kinds)
    colour = next(shape.colour for shape in scene.shapes if shape.kind == kind)
    return Answered(random.choice(_COLOUR_OF).format(k=kind), f"The {kind} is {colour}.")


def shape_of(random: Random, scene: Scene) -> Answered | None:
    """Asks which shape the only one of its colour is; None if there is no such shape."""
    colours = _singles(scene.colours())
    if not colours:
        return None
    colour = random.choice(colours)
    kind = next(shape.kind for shape in scene.shapes if shape.colour == colour)
    return Answered(random.choice(_SHAPE_OF).format(c=colour), f"The {colour} shape is a {kind}.")


def is_there(random: Random, scene: Scene) -> Answered:
    """Asks whether there is such a shape."""
    name = _some_name(random, scene)
    colour, kind = name.split()
    answer = f"Yes, there is a {name}." if scene.count(colour, kind) else f"No, there is no {name}."
    return Answered(random.choice(_IS_THERE).format(n=name), answer)


def describe(random: Random, scene: Scene) -> Answered:
    """Names all shapes in the order of colours and kinds."""
    counts = Counter(shape.name for shape in scene.shapes)
    parts = [f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts.items()]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return Answered(random.choice(_DESCRIBE), f"I see {listed}.")


def which_image(random: Random, scenes: tuple[Scene, Scene]) -> Answered | None:
    """Asks which of two images it is; None if the drawn question has no single answer."""
    first, second = scenes
    chance = random.random()
    if chance < 0.3:
        question, numbers = random.choice(_WHICH_MORE), [len(scene.shapes) for scene in scenes]
    elif chance < 0.5:
        colour = random.choice((*first.shapes, *second.shapes)).colour
        question = random.choice(_WHICH_MORE_NAMED).format(n=f"{colour} shape")
        numbers = [scene.count(colour=colour) for scene in scenes]
    else:
        shape = random.choice((*first.shapes, *second.shapes))
        colour_only, kind_only = chance < 0.65, chance > 0.85
        colour, kind = (None if kind_only else shape.colour), (None if colour_only else shape.kind)
        name = f"{shape.colour} shape" if colour_only else shape.kind if kind_only else shape.name
        question = random.choice(_WHICH).format(n=name)
        numbers = [min(1, scene.count(colour, kind)) for scene in scenes]
    if numbers[0] == numbers[1]:
        return None
    return Answered(question, f"The {_ORDINALS[numbers[1] > numbers[0]]} image.")


def of_one_image(random: Random, scenes: tuple[Scene, Scene]) -> Answered | None:
    """Asks something about the first or the second of two images."""
    index = random.randrange(2)
    skill = random.choice([name for name in SKILLS if name != "describe"])
    asked = SKILLS[skill](random, scenes[index])
    if asked is None or not asked.question.endswith("?") or "Does the image" in asked.question:
        return None
    stem = asked.question.removesuffix("?")
    for tail in (" there", " in the picture", " in this image"):
        stem = stem.removesuffix(tail)
    question = random.choice(_OF_IMAGE).format(q=stem, o=_ORDINALS[index], i=index + 1)
    return Answered(question, asked.answer)


def two_images(random: Random, scenes: tuple[Scene, Scene]) -> Answered | None:
    """Asks about two images that are shown together."""
    return which_image(random, scenes) if random.random() < 0.65 else of_one_image(random, scenes)


SKILLS: dict[str, Callable[[Random, Scene], Answered | None]] = {
    "count": count,
    "count_by_colour": count_by_colour,
    "count_by_kind": count_by_kind,
    "count_by_both": count_by_both,
    "colour_of": colour_of,
    "shape_of": shape_of,
    "is_there": is_there,
    "describe": describe,
}
"""Skills of one image."""

TWO_IMAGES = "two_images"
GOALS = {"count": 0.97, "count_by_colour": 0.97, "colour_of": 0.95, "shape_of": 0.95, TWO_IMAGES: 0.9}
"""The shares of right answers that the bundled model has to reach."""


@dataclass(frozen=True)
class VisualQuestion:
    """Images, a question about them, and the only right answer."""

    skill: str
    images: tuple[Image.Image, ...]
    question: str
    answer: str

    def accepts(self, answer: str) -> bool:
        """Whether ``answer`` is right to the letter."""
        return answer == self.answer


def held_out_questions(skill: str, number: int, seed: int) -> list[VisualQuestion]:
    """Returns questions of one skill about sets of shapes that training never shows; a seed always gives the same."""
    random = Random(f"visual/{skill}/{seed}")
    questions: list[VisualQuestion] = []
    while len(questions) < number:
        count = 2 if skill == TWO_IMAGES else 1
        scenes = [draw_scene(random, MOST_SHAPES, held_out=True) for _ in range(count)]
        asked = two_images(random, (scenes[0], scenes[1])) if count == 2 else SKILLS[skill](random, scenes[0])
        if asked is not None:
            images = tuple(picture(scene, random) for scene in scenes)
            questions.append(VisualQuestion(skill, images, asked.question, asked.answer))
    return questions
