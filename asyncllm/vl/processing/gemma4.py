"""Images of any size for Gemma 4: scaled to about the maximum number of patches, in whole squares of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidMessage
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import cut_squares, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["Gemma4Processor"]


class Gemma4Processor(ImageProcessor):
    """Pixels [patches, 3, patch * patch], ordered by the squares of patches that become a token each."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        before: Sequence[int],
        after: Sequence[int],
        sees_whole: bool,
    ) -> None:
        """`sees_whole`: whether an image's tokens attend to each other in both directions."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self.before, self.after = before, after
        self.patch = settings.integer("patch_size", 16, maximum=1024)
        self.merge = settings.integer("pooling_kernel_size", 3, maximum=64)
        self.max_tokens = settings.integer("max_soft_tokens", 280, maximum=2**14)
        self.joint = self.max_tokens if sees_whole else 0

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded, patch, pool = load_image(image), self.patch, self.merge
        rows, columns = self._squares(loaded.height, loaded.width)
        side = patch * pool
        patches = cut_squares(resized(loaded, rows * side, columns * side, self.settings.resample), patch, pool)
        return PromptImage(
            length=rows * columns,
            digest=digest_of(rows, columns, pixels=patches),
            pixels=self.settings.numbers(patches).reshape(-1, 3, patch * patch),
            pictures=((rows * pool, columns * pool),),
            size=(loaded.height, loaded.width),
            joint=self.joint > 0,
        )

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of squares. Raises InvalidMessage if the image is too narrow for them."""
        side = self.patch * self.merge
        factor = math.sqrt(self.max_tokens * self.merge**2 * self.patch**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if rows == 0:
            columns = min(width // height, self.max_tokens)
        elif columns == 0:
            rows = min(height // width, self.max_tokens)
        rows, columns = max(rows, 1), max(columns, 1)
        if rows * columns > self.max_tokens:
            raise InvalidMessage(f"The image of {width} x {height} is too narrow for this model. Cut it into several.")
        return rows, columns
