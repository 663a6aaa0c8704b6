"""An adapter whose modules have the names of a family's files is the checkpoint with the products added to its weights,
for every family and every layout of files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.models.build import open_model
from tests.adapters import delta, write_adapter
from tests.models.parity import FAMILIES, Case, folder_of, open_case, random_tokens
from tests.models.test_adapters import TOKENS, pooled, run
from tests.remote_layouts import LAYOUTS

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
WITHOUT = re.compile(
    r"expert|router|\.gate(\.wg)?$|kv_b_proj|indexer|norm$|shared_transf|linear_attn\.in_proj$"
    r"|mtp|vision|visual|audio|speech|embed|altup"
)
"""Modules that take no adapter, and parts that are not the decoder's."""
KEYS_OF_OTHERS = ("gemma4_towers",)
"""Their files have key products that no layer reads."""
TRANSPOSED = ("gpt2", "openai_gpt")
"""Weights in their files are [in, out]."""


def adapted(family: str, folder: Path, num_layers: int) -> dict[str, tuple[int, int]]:
    """Module name -> (out, in) of the matrices of the decoder's layers."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        layer = LAYER.search(module)
        if suffix != "weight" or tensor.dim() != 2 or layer is None or int(layer[1]) >= num_layers:
            continue
        if WITHOUT.search(module) or (family in KEYS_OF_OTHERS and module.endswith("k_proj")):
            continue
        rows, columns = tensor.shape
        found[module] = (columns, rows) if family in TRANSPOSED else (rows, columns)
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *(each for each in LAYOUTS if each not in FAMILIES)])
def test_an_adapter_is_the_checkpoint_with_merged_weights(family: str, tmp_path: Path) -> None:
    case = Case(family, "default")
    model, folder, tokens = open_case(case), folder_of(case), random_tokens(3, TOKENS)
    shapes = adapted(family, folder, model.config.num_layers)
    assert len(shapes) >= 2 * model.config.num_layers
    adapter = write_adapter(tmp_path / "adapter", shapes)
    merged = shutil.copytree(folder, tmp_path / "merged")
    tensors = load_file(merged / "model.safetensors")
    for module, shape in shapes.items():
        added = delta(module, shape)
        tensors[f"{module}.weight"] += added.t() if family in TRANSPOSED else added
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    other = open_model(merged, dtype=torch.float32, device=torch.device("cpu"), session_len=case.session_len)
    (expected,) = run(other, [tokens], [-1])
    with pooled(model, adapters={"a": str(adapter)}) as pool:
        pool.put(1, 0)
        plain, found = run(model, [tokens, tokens], [-1, 0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)
    assert (plain - expected).abs().max() > 0.05, "the adapter changes something"
