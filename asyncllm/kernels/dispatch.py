"""Chooses the implementation of an op: its torch reference, or the Triton launcher for tensors on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["op"]

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")
_Op = Callable[Concatenate[Tensor, _Rest], _Result]


def op(launcher: str) -> Callable[[_Op[_Rest, _Result]], _Op[_Rest, _Result]]:
    """Make the decorated function an op: its body is the contract, the oracle and the CPU implementation.

    `launcher` names its Triton counterpart, "module:function" below `asyncllm.kernels.triton`, with the same signature,
    which is imported when the op first gets a CUDA tensor. The first argument decides. The body stays available as
    `reference`. If torch has no CUDA support there is nothing to decide, and the op is its body: a decode step of a
    small model makes a hundred of these calls.
    """
    module, _, name = launcher.partition(":")

    def decorate(reference: _Op[_Rest, _Result]) -> _Op[_Rest, _Result]:
        launch: _Op[_Rest, _Result] | None = None
        if not torch._C._has_cuda:
            reference.reference = reference  # type: ignore[attr-defined]
            return reference

        @functools.wraps(reference)
        def dispatch(first: Tensor, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
            nonlocal launch
            if not first.is_cuda:
                return reference(first, *args, **kwargs)
            if launch is None:
                launch = getattr(import_module(f"asyncllm.kernels.triton.{module}"), name)
            return launch(first, *args, **kwargs)

        dispatch.reference = reference  # type: ignore[attr-defined]
        return dispatch

    return decorate
