"""PublishedModel: a family of its authors' code in tiny, put together from transformers' modules and plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from tests.vl.tiny_parts import IMAGE_ID

__all__ = ["CLIP_MEAN", "CLIP_STD", "PublishedModel", "normalized"]

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


class PublishedModel(nn.Module):
    """Its state's names are those of published files, once they are `renamed`."""

    architecture: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    """Other names of the same class."""
    oracle: ClassVar[str]
    """What it is made of, for the table of the documents."""
    fields: ClassVar[dict[str, Any]]
    """Of config.json."""
    pictures: ClassVar[dict[str, Any]] = {}
    """preprocessor_config.json, if there is one."""
    tokens: ClassVar[list[str]]
    """The first of them is `IMAGE_ID`."""
    template: ClassVar[str | None] = None
    files: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Further files of the folder."""
    code: ClassVar[str] = ""
    """What ixc_utils.py has, if there is one."""
    decoder: nn.Module
    """A causal model of transformers."""

    def renamed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state as files have it."""
        raise NotImplementedError

    def write_beside(self, folder: Path) -> None:
        """Write what the folder has besides."""

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the features of all images, one after the other [rows, hidden]."""
        raise NotImplementedError

    def pixels(self, image: Image.Image) -> NDArray[Any]:
        """Return the numbers that a tower reads of an image, by the published rule."""
        raise NotImplementedError

    def positions(self, shown: Sequence[bool]) -> Tensor:
        """Return the tokens' positions [1, T]. `shown`: which of them are images'."""
        return torch.arange(len(shown))[None]

    def type_tokens(self, shown: Sequence[bool]) -> None:
        """Tell layers which tokens are images'."""

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        """Return the logits [tokens, vocab] of expanded ids and their images."""
        inputs = torch.tensor([list(ids)])
        embedded = self.decoder.get_input_embeddings()(inputs).clone()  # type: ignore[operator]
        features = self.features(images) if images else embedded[0, :0]
        # An answer may have the token as well.
        places = [place for place, token in enumerate(ids) if token == IMAGE_ID][: len(features)]
        embedded[0, places] = features
        shown = [place in places for place in range(len(ids))]
        self.type_tokens(shown)
        result: Tensor = self.decoder(inputs_embeds=embedded, position_ids=self.positions(shown)).logits[0]
        return result


def normalized(image: Image.Image, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Return an image's numbers [3, height, width]."""
    numbers = (torch.from_numpy(np.array(image)).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    return numbers.permute(2, 0, 1)
