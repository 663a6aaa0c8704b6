"""An image of a prompt, as the engine passes it to the model, and the preprocessors that produce it. Needs no torch."""

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
"""Numbers in `pixels` (eight patches of 14 x 14) whose encoding takes as long as decoding one token: towers have 0.3 to
0.7 G parameters, decoders 7 to 8 G, and patches also attend to each other."""


class PromptImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a video of a prompt: the input of the vision tower, and the tokens whose embeddings its features
    replace. Or such features themselves (`given`)."""

    position: int = 0
    """Absolute position of its first token."""
    length: int
    """Number of tokens from the first to the last."""
    digest: bytes
    """Digest of everything that determines the features."""
    pixels: Any
    """A float32 numpy array, in the tower's input format."""
    given: bool = False
    """Whether `pixels` are embeddings from the caller [length, hidden], which replace those of the tokens as they
    are."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, if they have two-dimensional positions; None: consecutive positions."""
    shares_position: bool = False
    """Whether all tokens except the first and last share one position."""
    steps: int = 1
    """Number of grids that follow one another in time. A video has several; with `placeholder_rows` each has a
    placeholder of its own."""
    interval: float = 1.0
    """Distance in positions between consecutive grids."""
    size: tuple[int, int] = (0, 0)
    """Height and width before preprocessing."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of its tiles, for towers that reassemble them."""
    pictures: tuple[tuple[int, int], ...] = ()
    """Rows and columns of patches of each picture that the tower receives, for towers of any resolution."""
    text: str = ""
    """Its placeholder in the prompt's text, if it is not the family's."""
    placeholder_rows: tuple[int, ...] = ()
    """Number of feature rows of each of its placeholders in the text; (): one placeholder with a row for each token."""
    spans: tuple[tuple[int, int], ...] = ()
    """(start, end) of each placeholder's tokens, relative to its first token; tokens between them are text. Set
    together with `position`; (): all tokens."""
    separate: bool = False
    """Whether the tower encodes each placeholder separately; they have equal parts of the pixels."""
    joint: bool = False
    """Whether the tokens of a placeholder attend to each other in both directions and so must be computed in one
    step."""

    @property
    def end(self) -> int:
        return self.position + self.length

    def joint_around(self, position: int) -> tuple[int, int] | None:
        """Return the absolute (start, end) of the tokens that attend to each other on both sides of `position`, or None
        if there are none."""
        if self.joint and self.position < position < self.end:
            for start, stop in self.spans or ((0, self.length),):
                if self.position + start < position < self.position + stop:
                    return self.position + start, self.position + stop
        return None

    @property
    def num_features(self) -> int:
        """The number of feature rows."""
        return sum(self.placeholder_rows) or self.length

    def encodings(self) -> Iterator[tuple[int, int]]:
        """Yield, for each input of the tower, the position from which its features are needed and its cost, as the
        number of prompt tokens that take as long to compute."""
        if self.given:
            return
        work = int(getattr(self.pixels, "size", 0)) // _PIXELS_PER_TOKEN
        starts = [start for start, _ in self.spans] if self.separate else [0]
        for start in starts:
            yield self.position + start, work // len(starts)

    def at_placeholder(self, index: int) -> PromptImage:
        """Return the part of the image that the tower encodes for the placeholder with this index."""
        if not self.separate:
            return self
        share = len(self.pixels) // len(self.placeholder_rows)
        return msgspec.structs.replace(
            self,
            length=self.placeholder_rows[index],
            digest=self.digest + index.to_bytes(4, "little"),
            pixels=self.pixels[index * share : (index + 1) * share],
            steps=1,
            placeholder_rows=(self.placeholder_rows[index],),
            spans=(),
        )

    @property
    def shift(self) -> int:
        """The offset between positions and token numbers after the image. The image takes as many positions as the
        longest side of its grid or its duration, or three if its tokens share a position."""
        if self.shares_position:
            return 3 - self.length
        if self.grid is None:
            return 0
        if self.placeholder_rows:
            return len(self.placeholder_rows) * (max(self.grid) - self.placeholder_rows[0])
        return max(*self.grid, int((self.steps - 1) * self.interval) + 1) - self.length


class ImageProcessor(Protocol):
    """A family's image preprocessor for its vision tower. Several threads may use it at once."""

    placeholder: str
    """The placeholder of an image in the prompt's text. One of its tokens is `token_id`."""
    token_id: int
    """The placeholder token that is replaced by the image's tokens."""
    before: Sequence[int] = ()
    """Tokens before the image's."""
    after: Sequence[int] = ()
    joint: int = 0
    """Maximum number of tokens of a placeholder whose tokens attend to each other; 0: a prompt chunk may end inside an
    image."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load an image and return the tower's input. Takes milliseconds to seconds.

        Raises InvalidMessage if it is not an image, InvalidParameter for options that the family does not have.
        """


@runtime_checkable
class VideoProcessor(ImageProcessor, Protocol):
    """The preprocessor of a family that also accepts videos."""

    video_token_id: int
    """The placeholder token that is replaced by the video's tokens."""

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Load a video, given as a list of frames or a file, and return the tower's input, as `prepare` does for an
        image."""


@runtime_checkable
class CuttingProcessor(ImageProcessor, Protocol):
    """The preprocessor of a family that cuts images into tiles if a conversation has few of them."""

    max_cut_images: int
    """Maximum number of images in a conversation for which they are cut."""


@runtime_checkable
class AdaptedProcessor(ImageProcessor, Protocol):
    """The preprocessor of a family that computes prompts with images, and their answers, with an adapter."""

    adapter_name: str
    """Name of the adapter. Its folder inside the model's folder is `NAME-lora`."""


class ImagePreparation(Protocol):
    """An `ImageProcessor` that may cache its results. Several threads may use it at once."""

    @property
    def processor(self) -> ImageProcessor: ...

    def prepare(
        self, image: Any, options: Mapping[str, Any], cache_salt: str | None = None, *, is_video: bool = False
    ) -> PromptImage:
        """Return the result of the processor's `prepare` or `prepare_video`. Requests with different salts share no
        results, and their digests differ."""
