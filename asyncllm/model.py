"""LMDeploy's import path of chat templates, for programs written for it."""

from __future__ import annotations

from asyncllm.config import ChatTemplateConfig
from asyncllm.text.composed_template import BaseChatTemplate
from asyncllm.text.templates import MODELS

__all__ = ["MODELS", "BaseChatTemplate", "ChatTemplateConfig"]
