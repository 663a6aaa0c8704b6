"""The registry of chat templates, built-in ones and those of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from asyncllm.errors import InvalidParameter
from asyncllm.text.checkpoint_files import classes_of
from asyncllm.text.templates.builtin import ALIASES, ARCHITECTURES, BUILTIN
from asyncllm.text.templates.composed import BaseChatTemplate

__all__ = ["MODELS", "Registry", "builtin_name", "names"]

Template = TypeVar("Template", bound=type[Any])


class Registry:
    """Chat template classes by name: the built-in ones and those added by users."""

    def __init__(self, users: dict[str, type[Any]] | None = None) -> None:
        self.users = {} if users is None else users
        """Name -> class that a user has registered."""

    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: type[Any] | None = None
    ) -> Callable[[Template], Template]:
        """Return a class decorator that registers a chat template as `name` (or several names; None: the class's name).

        The class needs `get_prompt(prompt, sequence_start)` and `messages2prompt(messages, sequence_start)`; deriving
        from BaseChatTemplate provides both. Raises InvalidParameter if the name is taken, unless `force`.
        """

        def register(template: Template) -> Template:
            names = [template.__name__] if name is None else [name] if isinstance(name, str) else list(name)
            for method in ("get_prompt", "messages2prompt"):
                if not callable(getattr(template, method, None)):
                    raise InvalidParameter(
                        f"The chat template class {template.__name__} has no method {method}. Add it, or derive the "
                        f"class from BaseChatTemplate."
                    )
            for each in names:
                taken = self.get(each)
                # Running the same notebook cell twice defines the same class twice.
                again = taken is not None and taken.__qualname__ == template.__qualname__
                if taken is not None and not again and not force:
                    raise InvalidParameter(
                        f"There is a chat template {each!r} already. Choose another name, or pass force=True.", "name"
                    )
                self.users[each] = template
            return template

        if module is not None:
            register(module)
        return register

    def get(self, name: str) -> type[Any] | None:
        """Return the class of the template `name`, whose arguments replace its parts; None for an unknown name."""
        own = ALIASES.get(name, name)
        return self.users.get(name) or (_builtin(own) if own in BUILTIN else None)

    def build(self, name: str, overrides: dict[str, Any]) -> Any:
        """Return the template `name` with some of its parts replaced, or a new one of these. Raises
        InvalidParameter."""
        template = self.get(name) or BaseChatTemplate
        try:
            return template(**overrides)
        except TypeError as error:
            raise InvalidParameter(
                f"The chat template {name!r} cannot be built with {overrides!r}: {error}. "
                f"Give its class's __init__ these keyword arguments, or leave them out of ChatTemplateConfig."
            ) from error

    def names(self) -> list[str]:
        """Return all names but the aliases, sorted."""
        return sorted({*BUILTIN, *self.users})


@cache
def _builtin(name: str) -> type[BaseChatTemplate]:
    """Return the class of a built-in template."""

    class Builtin(BaseChatTemplate):
        def __init__(self, **parts: Any) -> None:
            # As in LMDeploy, a system part of the caller's is written, though there be no text for it.
            text = "" if parts.get("system") else None
            super().__init__(**{"meta_instruction": text, **BUILTIN[name], **parts})

    Builtin.__name__ = Builtin.__qualname__ = f"BaseChatTemplate[{name}]"
    return Builtin


MODELS = Registry()


def names() -> list[str]:
    """Return the names of all chat templates that ChatTemplateConfig(model_name=...) accepts."""
    return MODELS.names()


def builtin_name(config: dict[str, Any]) -> str:
    """Return the name of the built-in template for a checkpoint's config.json; "base" if none matches."""
    for name in classes_of(config):
        for architecture, entries, template in ARCHITECTURES:
            if name == architecture and all(_entry(config, key) == value for key, value in entries.items()):
                return template
    return "base"


def _entry(config: dict[str, Any], key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
