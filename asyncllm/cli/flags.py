"""Converts the settings in `config/` to command-line options, and options back to checked settings.

A field `max_new_tokens` becomes `--max-new-tokens`; its help is the field's description, and its default stays in the
Struct. Literals become choices, bools `--x` and `--no-x`, lists repeatable options, dicts repeated `NAME=VALUE`.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec

from asyncllm.config import ChatTemplateConfig, DistributorConfig, EngineConfig, GenerationConfig, ServerConfig
from asyncllm.config.lmdeploy_settings import COMMANDS, without_unsupported
from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import InvalidParameter

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_VISION_MODEL",
    "MODEL_HELP",
    "Parser",
    "add",
    "add_model_settings",
    "add_plugin",
    "add_unsupported",
    "check_unsupported",
    "load",
    "load_plugins",
    "load_template",
    "refuse",
]

DEFAULT_MODEL = "tiny-chat"
DEFAULT_VISION_MODEL = "tiny-vlm"
"""Default model for prompts with images."""
MODEL_HELP = f"A folder, a bundled model or a hub id. Default: {DEFAULT_MODEL}."

ALIASES = {
    "device_type": ["--device"],
    "capability": ["--cap"],
    "meta_instruction": ["--meta-instruct"],
    "disable_docs": ["--disable-fastapi-docs"],
    "routing_strategy": ["--strategy"],
    "server_name": ["--host"],
    "server_port": ["--port"],
}
"""Field -> further names for its option: LMDeploy's, and `--host` and `--port`, which are vLLM's and SGLang's."""

DEFAULT_NAMES = {"adapters": "default"}
"""Field of pairs -> name of a single value that is given without one, as in LMDeploy."""

Config = TypeVar("Config", EngineConfig, GenerationConfig, ChatTemplateConfig, ServerConfig, DistributorConfig)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest option for an unknown one, and accepts `_` for `-` in names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`. A subcommand that sets `parser` to itself gets its own hints and usage line."""
        end = args.index("--") if "--" in args else len(args)
        namespace, unknown = self.parse_known_args([*map(_dashes, args[:end]), *args[end:]])
        if unknown:
            self._refuse(unknown, getattr(namespace, "parser", self))
        return namespace

    def _refuse(self, unknown: list[str], command: argparse.ArgumentParser) -> None:
        hints = []
        for argument in unknown:
            name = argument.partition("=")[0]
            known = {option.lstrip("-"): option for option in command._option_string_actions}
            nearest = get_close_matches(name.lstrip("-"), known, n=1) if name.startswith("-") else []
            hints.append(f"{argument} (did you mean {known[nearest[0]]}?)" if nearest else argument)
        command.error(f"unrecognized arguments: {', '.join(hints)}")


def _dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def add(
    parser: argparse._ActionsContainer,
    config: type[msgspec.Struct],
    *,
    leave_out: Collection[str] = (),
    several: bool = False,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Add to `parser` an option for each field of `config`, except those in `leave_out`.

    `several`: options for lists and pairs take all following words, as in LMDeploy's server. `defaults`: the command's
    own defaults where they differ from the config's.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    shown = {**{field.name: field.default for field in msgspec.structs.fields(config)}, **defaults}
    for name in config.__struct_fields__:
        if name in leave_out:
            continue
        annotation, description = _unwrap(hints[name])
        options = _spelled(name), *ALIASES.get(name, ())
        help_text = f"{description} Default: {shown[name]}.".replace("%", "%%")
        kind = _kind(annotation, several, name in DEFAULT_NAMES)
        parser.add_argument(*options, dest=name, default=defaults.get(name, argparse.SUPPRESS), help=help_text, **kind)


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-").rstrip("-")


def load(namespace: argparse.Namespace, config: type[Config], **fixed: Any) -> Config:
    """Return the checked config from the given options and `fixed` fields. Raises InvalidParameter."""
    fields = {name: value for name, value in vars(namespace).items() if name in config.__struct_fields__}
    for name, value in fields.items():
        annotation, _ = _unwrap(typing.get_type_hints(config, include_extras=True)[name])
        if typing.get_origin(_without_none(annotation)) is dict:
            fields[name] = {}
            for key, item in (pair for pairs in value for pair in pairs.items()):
                if key is not None and key in fields[name]:
                    raise InvalidParameter(f"{key!r} is given twice. Give it once, or choose another name.", name)
                fields[name][key] = item
            if None in fields[name]:
                if len(value) > 1:
                    raise InvalidParameter(
                        f"{fields[name][None]!r} is not NAME=VALUE. One value alone needs no name, and a model's name "
                        f"stands before the option.",
                        name,
                    )
                fields[name] = {DEFAULT_NAMES[name]: fields[name][None]}
    return config.from_dict({**fields, **fixed}).checked()


def _unwrap(annotation: Any) -> tuple[Any, str]:
    """Return a field's type and its description."""
    if typing.get_origin(annotation) is Annotated:
        inner, *extra = typing.get_args(annotation)
        return inner, next((meta.description or "" for meta in extra if isinstance(meta, msgspec.Meta)), "")
    return annotation, ""


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        inner, _ = _unwrap(next(each for each in typing.get_args(annotation) if each is not type(None)))
        return inner
    return annotation


def _kind(annotation: Any, several: bool, unnamed: bool) -> dict[str, Any]:
    """Return the `add_argument` keywords for a field's type. `unnamed`: a value may be given without its name."""
    inner = _without_none(annotation)
    optional = inner is not annotation
    origin = typing.get_origin(inner)
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        choices = {str(choice): choice for choice in typing.get_args(inner)}
        # A word that is none of the choices stays text, for argparse to refuse.
        return {"choices": list(choices.values()), "type": lambda text: choices.get(text, text)}
    if origin is list:
        (item,) = typing.get_args(inner)
        action = {"action": "extend", "nargs": "+"} if several else {"action": "append"}
        return {**action, "type": item, "metavar": item.__name__.upper()}
    if origin is dict:
        key, value = (_unwrap(each)[0] for each in typing.get_args(inner))
        action = {"action": "extend", "nargs": "+"} if several else {"action": "append"}
        metavar = "[NAME=]VALUE" if unnamed else "NAME=VALUE"
        return {**action, "type": _pair(key, value, several, unnamed), "metavar": metavar}
    return {"type": _or_none(inner) if optional else inner, "metavar": inner.__name__.upper()}


def _or_none(kind: Any) -> Any:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = kind.__name__
    return parse


def _pair(key: Any, value: Any, several: bool, unnamed: bool) -> Any:
    def parse(text: str) -> dict[Any, Any]:
        whole = _json_or_text(text) if value is Any else None
        if isinstance(whole, dict):
            return whole
        name, equals, rest = text.partition("=")
        if not equals and unnamed:
            return {None: value(text)}
        if not equals:
            hint = ". A model's name stands before the option" if several else ""
            kinds = "NAME=VALUE, nor a JSON object" if value is Any else "NAME=VALUE"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kinds}{hint}")
        return {key(name): _json_or_text(rest) if value is Any else value(rest)}

    parse.__name__ = "NAME=VALUE"
    return parse


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def refuse(error: InvalidParameter, command: argparse.ArgumentParser) -> str:
    """Return the error's message, which names the command's option or argument in place of the field."""
    for action in command._actions:
        if action.dest == error.param:
            return f"{action.option_strings[0] if action.option_strings else action.metavar}: {error}"
    return str(error)


def add_model_settings(
    parser: Parser, defaults: Mapping[str, Any] = MappingProxyType({}), *, several: bool = False
) -> None:
    """Add the options of the chat template and of the engine to `parser`. `several`, `defaults`: see `add`."""
    parser.add_argument(
        "--backend", choices=("pytorch", "turbomind"), help="LMDeploy's back ends; both are this engine."
    )
    parser.add_argument(
        "--chat-template", metavar="NAME|FILE", help="A built-in chat template (`asyncllm list`) or a JSON file."
    )
    template_fields = set(ChatTemplateConfig.__struct_fields__) - {"meta_instruction", "capability"}
    add(parser.add_argument_group("chat template"), ChatTemplateConfig, leave_out=template_fields)
    add(parser.add_argument_group("engine"), EngineConfig, several=several, defaults=defaults)
    add_unsupported(parser, COMMANDS)


def add_unsupported(
    parser: argparse.ArgumentParser, names: Collection[str], table: Mapping[str, Unsupported] = COMMANDS
) -> None:
    """Add LMDeploy's options of these names, which are not implemented, to `parser`, but hide them from its help.

    Neutral values are accepted; `check_unsupported` refuses other values.
    """
    for name in names:
        values = table[name].values or ()
        is_flag = bool(values) and all(isinstance(value, bool) for value in values)
        kind: dict[str, Any] = {"action": "store_true"} if is_flag else {"type": _json_or_text, "metavar": "VALUE"}
        parser.add_argument(
            _spelled(name), dest=f"unsupported_{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind
        )


def check_unsupported(namespace: argparse.Namespace, table: Mapping[str, Unsupported] = COMMANDS) -> None:
    """Raise UnsupportedFeature for an LMDeploy option that asks for something not implemented."""
    given = vars(namespace)
    without_unsupported(table, {name: given[f"unsupported_{name}"] for name in table if f"unsupported_{name}" in given})


def load_template(options: argparse.Namespace) -> ChatTemplateConfig:
    """Return the chat template by name or from a JSON file, with the fields given as options overriding its own."""
    choice = options.chat_template
    if choice is None:
        config = ChatTemplateConfig()
    elif choice.endswith(".json") or choice.lstrip().startswith("{"):
        config = ChatTemplateConfig.from_json(choice)
    else:
        config = ChatTemplateConfig(model_name=choice)
    given = {name: value for name, value in vars(options).items() if name in ("meta_instruction", "capability")}
    return msgspec.structs.replace(config, **given)


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """Add the engine's plugin option to a command without an engine."""
    every = [name for name in EngineConfig.__struct_fields__ if name != "plugin"]
    add(parser, EngineConfig, leave_out=every)


def load_plugins(options: argparse.Namespace) -> None:
    """Run the files of `add_plugin`. Raises ModelError."""
    files = getattr(options, "plugin", None)
    if files:
        from asyncllm.models import plugins

        plugins.load_plugins(files)
