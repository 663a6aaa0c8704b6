"""Every tensor of every format, missing, of another size, of another type, or not a number: the error names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from tests.checkpoints import build_checkpoint
from tests.quant.formats import Eight, Format, awq, eight, fp8, gptq, packed, smooth_quant, write
from tests.quant.test_packed_weights import open_cpu

DOWN = "model.layers.0.mlp.down_proj."

FORMATS: dict[str, Format | Eight] = {
    "awq-gemm": awq(128),
    "awq-gemv": awq(64, "gemv"),
    "gptq": gptq(4, 64),
    "gptq-ordered-v2": gptq(8, 128, symmetric=False, second=True, shuffled=True),
    "packed": packed(4, 128, symmetric=False),
    "fp8-block": fp8("block"),
    "fp8-tensor-static": fp8("tensor", static=True),
    "fp8-channel": fp8("channel"),
    "smooth-int8": smooth_quant(),
    "compressed-int8": eight("int8", "channel"),
}


def _shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1] if tensor.ndim and len(tensor) > 1 else tensor.reshape(-1).repeat(3)


def _nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


def damages(name: str, tensor: Tensor, ordered: bool) -> Iterator[tuple[str, Callable[[Tensor], Tensor] | None]]:
    # Without g_idx a weight of GPTQ's has its groups in order, unless they are said not to be.
    if ordered or not name.endswith("g_idx"):
        yield "missing", None
    yield "size", _shorter
    yield "type", lambda tensor: torch.zeros(tensor.shape, dtype=torch.bool)
    if "scale" in name:
        yield "number", _nan


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_names_the_tensor(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = write(build_checkpoint("llama", tmp_path / "dense", **sizes), tmp_path / "model", FORMATS[name])
    file = folder / "model.safetensors"
    whole = load_file(file)
    own = [key for key in whole if key.startswith(DOWN)]
    assert len(own) >= 2
    for key in own:
        for what, damage in damages(key, whole[key], "ordered" in name):
            tensors = {each: tensor for each, tensor in whole.items() if each != key}
            if damage is not None:
                tensors[key] = damage(whole[key]).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
            with pytest.raises((InvalidCheckpoint, UnsupportedModel)) as caught:
                open_cpu(folder)
            said = str(caught.value)
            assert "mlp.down" in said, (key, what, said)
            assert what == "number" or key.removeprefix(DOWN) in said, (key, what, said)
