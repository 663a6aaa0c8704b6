"""An image of a prompt, as the engine hands it to the model side, and who prepares it: plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

__all__ = [
    "AdaptedProcessor",
    "CuttingProcessor",
    "ImagePreparation",
    "ImageProcessor",
    "PromptImage",
    "VideoProcessor",
]

_PIXELS_PER_TOKEN = 8 * 588
"""Numbers in `pixels` (of eight patches of 14 x 14) that take a tower as long as one token takes the decoder: towers
have 0.3 to 0.7 G parameters, decoders 7 to 8 G, and patches also attend to each other."""


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a video of a prompt: the input of the model's tower, and the tokens whose embeddings its features
    replace."""

    position: int = 0
    """Absolute position of its first token."""
    length: int
    """Number of tokens from its first to its last."""
    digest: bytes
    """Digest of everything that the features depend on."""
    pixels: Any
    """A float32 numpy array, as the tower takes it."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, if they have positions in two dimensions; None: they follow one another."""
    shared: bool = False
    """Whether all of its tokens but the first and the last have one position."""
    steps: int = 1
    """Number of grids that follow one another in time; a video has several, each at a place of its own if it has
    `slots`."""
    interval: float = 1.0
    """Positions from one grid to the next."""
    size: tuple[int, int] = (0, 0)
    """Height and width before preprocessing."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of its tiles, for towers that put tiles together."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the patches of each picture that the tower gets of it, for towers of any resolution."""
    text: str = ""
    """Its placeholder in a prompt's text, if not the family's."""
    slots: tuple[int, ...] = ()
    """Rows of features of each of its places in the text; () for one place with a row for each token."""
    spans: tuple[tuple[int, int], ...] = ()
    """(start, end) of the tokens of each place, among its tokens; tokens between them are text. Written together with
    its position; () for all tokens."""
    apart: bool = False
    """Whether the tower sees each place by itself; places have equal parts of the pixels."""
    joint: bool = False
    """Whether the tokens of a place see each other, so that they have to be computed in one step."""

    @property
    def end(self) -> int:
        return self.position + self.length

    def joint_around(self, position: int) -> tuple[int, int] | None:
        """Return the absolute (start, end) of tokens that see each other and lie on both sides of `position`; None if
        there are none."""
        if self.joint and self.position < position < self.end:
            for start, stop in self.spans or ((0, self.length),):
                if self.position + start < position < self.position + stop:
                    return self.position + start, self.position + stop
        return None

    @property
    def num_features(self) -> int:
        """Number of rows of features."""
        return sum(self.slots) or self.length

    def encodings(self) -> Iterator[tuple[int, int]]:
        """Yield for each input of the tower the position from which its features are needed, and its work: the number
        of prompt tokens that take as long to compute."""
        work = int(getattr(self.pixels, "size", 0)) // _PIXELS_PER_TOKEN
        starts = [start for start, _ in self.spans] if self.apart else [0]
        for start in starts:
            yield self.position + start, work // len(starts)

    def seen_at(self, place: int) -> PromptImage:
        """Return the image for the tower of the place with this number."""
        if not self.apart:
            return self
        share = len(self.pixels) // len(self.slots)
        return msgspec.structs.replace(
            self,
            length=self.slots[place],
            digest=self.digest + place.to_bytes(4, "little"),
            pixels=self.pixels[place * share : (place + 1) * share],
            steps=1,
            slots=(self.slots[place],),
            spans=(),
        )

    @property
    def shift(self) -> int:
        """Offset of the positions behind it from the numbers of tokens. Its positions are as many as the longest side
        of its grid, or its time; with a shared position they are three."""
        if self.shared:
            return 3 - self.length
        if self.grid is None:
            return 0
        if self.slots:
            return len(self.slots) * (max(self.grid) - self.slots[0])
        return max(*self.grid, int((self.steps - 1) * self.interval) + 1) - self.length


class ImageProcessor(Protocol):
    """A family's preparation of images for its tower. Used by several threads at once."""

    placeholder: str
    """The placeholder of an image in a prompt's text. One of its tokens is `token_id`."""
    token_id: int
    """The placeholder's token that is replaced by the image's tokens."""
    before: Sequence[int] = ()
    """Tokens in front of the image's."""
    after: Sequence[int] = ()
    joint: int = 0
    """Most tokens of a place whose tokens see each other; 0: a chunk of a prompt may end in any image."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load an image and return the input of the tower. Takes milliseconds to seconds.

        Raises InvalidMessage if it is no image, InvalidParameter for options that the family does not have.
        """


@runtime_checkable
class VideoProcessor(ImageProcessor, Protocol):
    """The preparation of a family that takes videos too."""

    video_token_id: int
    """The placeholder's token that is replaced by the video's tokens."""

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load a video, which is a list of frames or a file, as `prepare` does an image, and return the input of the
        tower."""


@runtime_checkable
class CuttingProcessor(ImageProcessor, Protocol):
    """The preparation of a family that cuts images into tiles if a conversation has few of them."""

    most_cut: int
    """Most images of a conversation whose images are cut."""


@runtime_checkable
class AdaptedProcessor(ImageProcessor, Protocol):
    """The preparation of a family whose prompts with images, and their answers, are computed with an adapter."""

    adapter_name: str
    """Its name. In the model's folder it lies in the folder of this name with -lora behind it."""


class ImagePreparation(Protocol):
    """An `ImageProcessor` that may remember what it has prepared. Used by several threads at once."""

    @property
    def processor(self) -> ImageProcessor: ...

    def prepare(
        self, image: Any, options: Mapping[str, Any], cache_salt: str | None = None, *, is_video: bool = False
    ) -> PromptImage:
        """Return the result of the processor's `prepare` or `prepare_video`. Requests of different salts share nothing,
        and their digests differ."""
