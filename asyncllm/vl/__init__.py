"""Images for vision-language models: safe loading, preparation, and vision towers.

image = load_image("tiger.jpeg")
response = pipe(("describe this image", image))
"""

from __future__ import annotations

from asyncllm.vl.constants import IMAGE_TOKEN
from asyncllm.vl.loading import encode_image_base64, load_image

__all__ = ["IMAGE_TOKEN", "encode_image_base64", "load_image"]
