"""LMDeploy's import path of the functions that load and encode images."""

from __future__ import annotations

from asyncllm.vl.loading import encode_image_base64, load_image

__all__ = ["encode_image_base64", "load_image"]
