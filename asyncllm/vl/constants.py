"""The placeholder for an image in a prompt's text, under LMDeploy's import path."""

from __future__ import annotations

from asyncllm.text.image_marks import IMAGE_TOKEN

__all__ = ["IMAGE_TOKEN"]
