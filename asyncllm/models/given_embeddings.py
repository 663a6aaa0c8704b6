"""Prompts that hold embeddings from callers instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asyncllm.errors import UnsupportedFeature
from asyncllm.layers.embedding import Embedding
from asyncllm.models.decoder import DecoderLM
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import VisionTower

__all__ = ["take_embeddings"]


class _NoTower(VisionTower):
    """Stands for the tower of a model for texts, whose embeddings are merged like features of images."""

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        raise NotImplementedError("the engine refuses images")


def take_embeddings(model: DecoderLM) -> None:
    """Let embeddings from callers replace those of tokens. They are transformers' `inputs_embeds`, which families may
    scale like the embeddings of tokens. Raises UnsupportedFeature if layers need the tokens themselves."""
    vision, embed = model.config.vision, model.embed
    has_image_rows = vision is not None and vision.image_rows is not None
    if model.reads_token_ids or has_image_rows or type(embed) is not Embedding:
        raise UnsupportedFeature(
            f"enable_prompt_embeds: the layers of {model.config.architecture} read more of a token than its embedding, "
            f"or read images in their own way. Leave it out.",
            "enable_prompt_embeds",
        )
    model.takes_embeddings = True
    if model.vision is None:
        model.vision = _NoTower()
        if model.scales_images:
            embed.scale = None
