"""The command line's options about a model that several commands have: its name, its settings, its chat template."""

from __future__ import annotations

import argparse

import msgspec

from asyncllm import flags
from asyncllm.config import ChatTemplateConfig, EngineConfig

__all__ = ["DEFAULT_MODEL", "MODEL_HELP", "add_model_settings", "load_template"]

DEFAULT_MODEL = "tiny-chat"
MODEL_HELP = f"A folder, a bundled model or a hub id. Default: {DEFAULT_MODEL}."


def add_model_settings(parser: flags.Parser) -> None:
    """Give `parser` the options of the chat template and of the engine."""
    parser.add_argument(
        "--chat-template", metavar="NAME|FILE", help="A built-in chat template (`asyncllm list`) or a JSON file."
    )
    template_fields = set(ChatTemplateConfig.__struct_fields__) - {"meta_instruction", "capability"}
    flags.add(parser.add_argument_group("chat template"), ChatTemplateConfig, leave_out=template_fields)
    flags.add(parser.add_argument_group("engine"), EngineConfig)


def load_template(options: argparse.Namespace) -> ChatTemplateConfig:
    """The chat template by name or from a JSON file, with the fields given as options in place of its own."""
    choice = options.chat_template
    if choice is None:
        config = ChatTemplateConfig()
    elif choice.endswith(".json") or choice.lstrip().startswith("{"):
        config = ChatTemplateConfig.from_json(choice)
    else:
        config = ChatTemplateConfig(model_name=choice)
    given = {name: value for name, value in vars(options).items() if name in ("meta_instruction", "capability")}
    return msgspec.structs.replace(config, **given)
