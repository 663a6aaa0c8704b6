"""What goes into a module and what comes out, in models of ours and of transformers alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.errors import InvalidParameter
from asyncllm.models.decoder import DecoderLM
from asyncllm.porting.step_context import make_step_context

__all__ = ["Call", "ModuleIOExtractor", "recorded"]


class Call(NamedTuple):
    """One call of a module. Tensors are copies, as ops may write to theirs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Keep every call of these modules while the block runs, by name and in order."""
    calls: dict[str, list[Call]] = {name: [] for name in modules}
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    # Layers of ours take no hooks: their call is their `forward`, whichever the instance has.
    for name, module in modules.items():
        vars(module)["forward"] = _keeping(module.forward, calls[name])
    try:
        yield calls
    finally:
        for name, module in modules.items():
            own = before[name]
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


class ModuleIOExtractor:
    """Runs a model once and gives one module's arguments and result.

    `model`: one of transformers', or a `DecoderLM`. `target`: a module of it, or its path, such as "layers.0.attn".
    """

    def __init__(self, model: nn.Module, target: nn.Module | str) -> None:
        """Raises InvalidParameter for a module that is not the model's."""
        named = dict(model.named_modules())
        found = named.get(target) if isinstance(target, str) else target
        if found is None or not any(found is each for each in named.values()):
            near = ", ".join(name for name in list(named)[1:6])
            raise InvalidParameter(f"target is no module of the model, which has {near} and others.", "target")
        self.model, self.target = model, found

    @torch.inference_mode()
    def extract(self, *args: Any, **kwargs: Any) -> Call:
        """Return the module's first call while the model runs on these arguments: `input_ids` [B, S] or [S] first.

        A `DecoderLM` takes nothing else and runs on a context of `make_step_context`. Raises InvalidParameter where the
        module is not called.
        """
        with recorded({"target": self.target}) as calls:
            if isinstance(self.model, DecoderLM):
                self.model.logits(self.model(make_step_context(*args, model=self.model, **kwargs)))
            else:
                self.model(*args, **kwargs)
        if not calls["target"]:
            raise InvalidParameter(
                f"target: the model runs without a call of this {type(self.target).__name__}. An op may read its "
                f"weights instead; take the module around it.",
                "target",
            )
        return calls["target"][0]


def _keeping(forward: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def keep(*args: Any, **kwargs: Any) -> Any:
        before = _copied(args), _copied(kwargs)
        output = forward(*args, **kwargs)
        calls.append(Call(*before, _copied(output)))
        return output

    return keep


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(each) for each in value)
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return value
