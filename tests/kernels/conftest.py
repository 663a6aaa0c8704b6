"""What compiles kernels is started once for all files; what interprets them adapts the language once for a kernel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter

from tests.kernels import offline


@pytest.fixture(scope="session")
def compile_kernels() -> Iterator[offline.Compile]:
    with offline.compiler() as compile_module:
        yield compile_module


@pytest.fixture(scope="session", autouse=True)
def _language_is_adapted_once_for_a_kernel() -> Iterator[None]:
    """The interpreter replaces the functions of triton.language as a kernel starts, and would again, in vain, at each
    call that the kernel makes to a function of its own. That is a fifth of these tests' time."""
    adapt = interpreter._patch_lang

    def adapt_once(function: Any) -> Any:
        seen = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        if any(language.core.is_builtin(each.load) for each in seen if each in (language, language.core)):
            return adapt(function)
        return None

    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            patch.setattr(interpreter, "_patch_lang", adapt_once)
        yield
