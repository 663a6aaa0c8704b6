"""How a sentence-transformers folder embeds: its modules.json, and the settings of its pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.types import Pooling

__all__ = ["EmbeddingDefaults", "pooling_folder"]

MODULES_NAME = "modules.json"
POOLING_FOLDER = "1_Pooling"

_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
"""Names of pooling modes, in both spellings of the settings."""

_MODE = "pooling_mode"
_IMPLEMENTED = {"Transformer", "Pooling", "Normalize"}


class EmbeddingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is meant to embed. Without these files: the last token, at length 1."""

    pooling: Pooling = "last"
    normalize: bool = True
    refused: str = ""
    """Why the model's pooling is not implemented, as a sentence; empty if it is implemented."""

    @classmethod
    def read(cls, folder: Path) -> EmbeddingDefaults:
        """Read the files of `folder`, any of which may be missing. Raises InvalidCheckpoint for a damaged one."""
        modules = _modules(folder / MODULES_NAME)
        kinds = [kind for kind, _ in modules]
        settings = folder / (pooling_folder(folder) or POOLING_FOLDER) / "config.json"
        normalize = "Normalize" in kinds if modules else True
        surplus = sorted(set(kinds) - _IMPLEMENTED)
        if surplus:
            why = f"{folder / MODULES_NAME} asks for {', '.join(map(short, surplus))}, which is not implemented."
            return cls(normalize=normalize, refused=why)
        if not settings.exists():
            missing = "Pooling" in kinds
            return cls(normalize=normalize, refused=f"{settings} is missing. Download it." if missing else "")
        modes = _modes(read_json_object(settings))
        if len(modes) != 1 or modes[0] not in _POOLINGS:
            why = f"{settings} asks for the pooling {' and '.join(map(short, modes))}, which is not implemented."
            return cls(normalize=normalize, refused=why)
        return cls(pooling=_POOLINGS[modes[0]], normalize=normalize)


def pooling_folder(folder: Path) -> str | None:
    """Return the name of the folder below `folder` with the settings of the pooling; None if modules.json names none.
    Raises InvalidCheckpoint for a damaged file."""
    return next((path for kind, path in _modules(folder / MODULES_NAME) if kind == "Pooling"), None)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module; empty without the file."""
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidCheckpoint(f"{file} is not a list of JSON objects ({error}). Download it again.") from None
    found = []
    for module in modules:
        kind, path = module.get("type"), module.get("path")
        # A folder from the hub must not reach files outside it.
        if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path or "\0" in path:
            raise InvalidCheckpoint(f"{file}: {short(module)} has no type and folder. Download the file again.")
        found.append((kind.rpartition(".")[2], path))
    return found


def _modes(settings: dict[str, Any]) -> list[str]:
    """Return the enabled pooling modes; there should be exactly one."""
    named = settings.get(_MODE)
    if named is not None:
        return [str(mode) for mode in (named if isinstance(named, list) else [named])]
    flags = {key: value for key, value in settings.items() if key.startswith(f"{_MODE}_")}
    # The library's own default.
    return [key.removeprefix(f"{_MODE}_") for key, value in flags.items() if value] if flags else ["mean"]
