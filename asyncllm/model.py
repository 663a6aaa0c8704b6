"""LMDeploy's import path for chat templates: `from asyncllm.model import MODELS, BaseChatTemplate`."""

from asyncllm.config import ChatTemplateConfig
from asyncllm.text.composed_template import BaseChatTemplate
from asyncllm.text.templates import MODELS

__all__ = ["MODELS", "BaseChatTemplate", "ChatTemplateConfig"]
