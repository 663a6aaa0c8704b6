"""Records the inputs and outputs of modules, in our models and in transformers alike."""

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
    """One call of a module. Tensors are copies, because ops may write to the originals."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Record every call of these modules during the block, by name and in order."""
    calls: dict[str, list[Call]] = {name: [] for name in modules}
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    # Our layers take no hooks: calling one calls its `forward`, which an instance may override.
    for name, module in modules.items():
        vars(module)["forward"] = _recording(module.forward, calls[name])
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
    """Runs a model once and returns one module's arguments and result.

    `model`: a transformers model, or a `DecoderLM`. `target`: one of its modules, or the path of one, such as
    "layers.0.attn".
    """

    def __init__(self, model: nn.Module, target: nn.Module | str) -> None:
        """Raise InvalidParameter for a module that is not part of the model."""
        named = dict(model.named_modules())
        found = named.get(target) if isinstance(target, str) else target
        if found is None or not any(found is each for each in named.values()):
            near = ", ".join(name for name in list(named)[1:6])
            raise InvalidParameter(f"target is not a module of the model, which has {near} and others.", "target")
        self.model, self.target = model, found

    @torch.inference_mode()
    def extract(self, *args: Any, **kwargs: Any) -> Call:
        """Return the module's first call while the model runs on these arguments: `input_ids` [B, S] or [S] first.

        A `DecoderLM` takes no other arguments, and runs on a step of `make_step_context`. Raises InvalidParameter if
        the module is not called.
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


def _recording(forward: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
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
