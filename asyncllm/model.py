"""LMDeploy's place of the chat templates, so that programs written for it find them."""

from __future__ import annotations

from asyncllm.config import ChatTemplateConfig
from asyncllm.text.composed_template import BaseChatTemplate
from asyncllm.text.templates import MODELS

__all__ = ["MODELS", "BaseChatTemplate", "ChatTemplateConfig"]
