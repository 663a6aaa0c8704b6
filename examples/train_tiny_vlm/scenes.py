"""Scenes of coloured shapes, and their pictures as PIL draws them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageColor, ImageDraw

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
KINDS = ("circle", "square", "triangle", "star")
MOST_SHAPES = 8
SIDE = 112
"""Of the picture that the model reads, in pixels."""

HELD_OUT_PERCENT = 10

_RGB = {name: ImageColor.getrgb(name)[:3] for name in COLOURS}
_JITTER = 14
_LARGEST, _SMALLEST = 0.29, 0.065
_SPREAD = 0.44
"""A shape's largest radius among ``n`` is this over the root of ``n``."""
_GAP = 0.02
_SIZES = (96, 128, 160, 224, 224, 256, 300)
_STAR = tuple(
    (radius * math.sin(index * math.pi / 5), -radius * math.cos(index * math.pi / 5))
    for index, radius in enumerate((1.0, 0.45) * 5)
)
_TRIANGLE = ((0.0, -1.0), (0.9, 0.75), (-0.9, 0.75))


@dataclass(frozen=True)
class Shape:
    """A shape; place and radius are shares of the picture's sides."""

    colour: str
    kind: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """As ``red circle``."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """Shapes that do not touch each other, in the order of ``COLOURS`` and ``KINDS``."""

    shapes: tuple[Shape, ...]

    def count(self, colour: str | None = None, kind: str | None = None) -> int:
        """How many shapes have this colour, this kind, or both."""
        return sum(colour in (None, shape.colour) and kind in (None, shape.kind) for shape in self.shapes)

    def colours(self) -> Counter[str]:
        """How often each colour is seen."""
        return Counter(shape.colour for shape in self.shapes)

    def kinds(self) -> Counter[str]:
        """How often each kind is seen."""
        return Counter(shape.kind for shape in self.shapes)

    @property
    def content(self) -> str:
        """What is shown, wherever it is: what the hold-out rule looks at."""
        return ",".join(shape.name for shape in self.shapes)


def is_held_out(scene: Scene) -> bool:
    """Whether a set of shapes belongs to the evaluation; training sees it in no arrangement."""
    digest = hashlib.blake2b(scene.content.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def _names(random: Random, count: int) -> list[tuple[str, str]]:
    """Draws shapes from a palette that is often small, so that some colours and kinds are many and others single."""
    colours = random.sample(COLOURS, random.randint(min(2, count), len(COLOURS)))
    kinds = random.sample(KINDS, random.randint(min(2, count), len(KINDS)))
    names = [(random.choice(colours), random.choice(kinds)) for _ in range(count)]
    return sorted(names, key=lambda name: (COLOURS.index(name[0]), KINDS.index(name[1])))


def _places(random: Random, count: int) -> list[tuple[float, float, float]]:
    """Draws places and radii of shapes that do not touch."""
    largest = min(_LARGEST, _SPREAD / math.sqrt(count))
    while True:
        places: list[tuple[float, float, float]] = []
        for _ in range(count * 12):
            radius = random.uniform(_SMALLEST, largest)
            x, y = random.uniform(radius, 1 - radius), random.uniform(radius, 1 - radius)
            if all(math.hypot(x - left, y - top) > radius + other + _GAP for left, top, other in places):
                places.append((x, y, radius))
                if len(places) == count:
                    return places
        largest *= 0.9


def draw_scene(random: Random, most: int = MOST_SHAPES, *, held_out: bool) -> Scene:
    """Draws a scene of 1 to ``most`` shapes on the wanted side of the hold-out rule."""
    while True:
        count = random.randint(1, most)
        scene = Scene(tuple(Shape(colour, kind, 0.0, 0.0, 0.0) for colour, kind in _names(random, count)))
        if is_held_out(scene) == held_out:
            break
    places = _places(random, count)
    return Scene(
        tuple(Shape(shape.colour, shape.kind, *place) for shape, place in zip(scene.shapes, places, strict=True))
    )


def _near(random: Random, colour: tuple[int, ...], jitter: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, channel + random.randint(-jitter, jitter))) for channel in colour)
    return red, green, blue


def _background(random: Random) -> tuple[int, int, int]:
    if random.random() < 0.5:
        return (255, 255, 255)
    grey = random.randint(215, 255)
    return _near(random, (grey, grey, grey), 8)


def picture(scene: Scene, random: Random, *, width: int | None = None, height: int | None = None) -> Image.Image:
    """Draws a scene with plain PIL calls; without sizes, in one of several, half of the time that of the model."""
    if width is None or height is None:
        width = height = SIDE if random.random() < 0.5 else random.choice(_SIZES)
        if random.random() < 0.15:
            height = round(width * random.uniform(0.75, 1.3))
    image = Image.new("RGB", (width, height), _background(random))
    drawing = ImageDraw.Draw(image)
    scale = min(width, height)
    order = list(scene.shapes)
    random.shuffle(order)
    for shape in order:
        fill = _near(random, _RGB[shape.colour], _JITTER)
        x, y, radius = shape.x * width, shape.y * height, shape.radius * scale
        if shape.kind == "circle":
            drawing.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        elif shape.kind == "square":
            half = 0.85 * radius
            drawing.rectangle((x - half, y - half, x + half, y + half), fill)
        else:
            corners = _STAR if shape.kind == "star" else _TRIANGLE
            drawing.polygon([(x + radius * right, y + radius * down) for right, down in corners], fill)
    return image


def model_picture(image: Image.Image) -> Image.Image:
    """The picture in the model's size, as the preprocessor's settings in ``export`` have it."""
    return image if image.size == (SIDE, SIDE) else image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
