"""Families from the user's own Python files: `EngineConfig(plugin=[...])`, `--plugin FILE`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from asyncllm.errors import ModelError
from asyncllm.models.registry import families, register_all_or_nothing

__all__ = ["load_plugins"]


def load_plugins(files: Sequence[str | Path]) -> None:
    """Run each file once, in order. What it registers is available from then on, in this process.

    Raises ModelError for a file that cannot be read or that raises, and then registers nothing from it.
    """
    for file in files:
        path = Path(file).expanduser().resolve()
        name = f"asyncllm_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}_{path.stem}"
        if name in sys.modules:
            continue
        families()
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ModelError(f"plugin: {file} is not a Python file. Name one that ends in .py.")
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            with register_all_or_nothing():
                spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ModelError(f"plugin: {file} cannot be used: {error!r}. Mend the file, or leave it out.") from error
