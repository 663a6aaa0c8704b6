"""hf_overrides that nothing reads, such as misspelled ones, are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from asyncllm.errors import InvalidParameter, short
from asyncllm.models.overrides import MOVED
from asyncllm.models.registry import ModelOptions, read_config
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.text.config_overrides import GROUPS
from asyncllm.vl.processor import open_processor

__all__ = ["refuse_unread"]


class _Probe:
    """A value that notes whether anything looks at it, as `isinstance` does with its class; copying is not looking."""

    seen = False

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            self.seen = True
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        self.seen = True
        return self is other

    def __hash__(self) -> int:
        self.seen = True
        return id(self)

    def __bool__(self) -> bool:
        self.seen = True
        return True

    def __repr__(self) -> str:
        self.seen = True
        return "probe"


def refuse_unread(folder: Path, **options: Unpack[ModelOptions]) -> None:
    """Raise InvalidParameter for an entry of hf_overrides that `folder`/config.json lacks, and that neither the model's
    family nor the image processor reads. With all of `options`, `read_config` has to succeed.

    A probe takes the place of each such entry. The entry counts as read if anything looks at the probe, fails because
    of it, or gives another result than without it.
    """

    def read(overrides: Mapping[str, Any]) -> object:
        changed: ModelOptions = {**options, "hf_overrides": overrides}
        processor = open_processor(folder, overrides)
        known = {} if processor is None else vars(processor)
        settings = {name: each for name, each in known.items() if isinstance(each, int | float | str)}
        return read_config(folder, **changed), type(processor), settings

    overrides = options.get("hf_overrides")
    if not overrides:
        return
    file = read_json_object(folder / "config.json")
    for path in _added(overrides, file, file):
        probe = _Probe()
        try:
            if read(_changed(overrides, path, probe)) != read(_changed(overrides, path, None)) or probe.seen:
                continue
        except Exception:  # of any kind, also of a plugin
            continue
        raise InvalidParameter(
            f"hf_overrides: nothing reads an entry {short(path[-1])} of this model's config.json, so it would have no "
            f"effect. Correct its name, or leave it out.",
            "hf_overrides",
        )


def _added(
    overrides: Mapping[str, Any], place: Mapping[str, Any], file: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """Yield the names that lead to each entry that no part of the file has. `place`: the part of `file` that the
    overrides are for."""
    for key, value in overrides.items():
        own = place.get(key)
        if key in GROUPS and isinstance(own, Mapping) and isinstance(value, Mapping):
            yield from ((key, *inner) for inner in _added(value, own, file))
        elif key not in MOVED and not _mentions(file, key):
            yield (key,)


def _mentions(fields: Mapping[str, Any], key: str) -> bool:
    return key in fields or any(_mentions(part, key) for part in fields.values() if isinstance(part, Mapping))


def _changed(overrides: Mapping[str, Any], path: tuple[str, ...], probe: _Probe | None) -> dict[str, Any]:
    """Return the overrides with `probe` as the entry at `path`; None: without the entry."""
    name, *inner = path
    if inner:
        return {**overrides, name: _changed(overrides[name], tuple(inner), probe)}
    others = {key: value for key, value in overrides.items() if key != name}
    return others if probe is None else {**others, name: probe}
