"""merge_lora: merged is unmerged, for all that a row may have and for what it may not; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm import EngineConfig
from asyncllm.cli import main
from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidParameter, UnsupportedModel
from asyncllm.lite import merge_lora
from asyncllm.pipeline import Pipeline
from tests.adapters import PREFIX, delta, write_adapter
from tests.checkpoints import build_checkpoint
from tests.vl.checkpoints import folder_of as vlm_folder

CPU = {"device_type": "cpu", "num_gpu_blocks": 32}
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("base"), vocab_size=320)


def shapes_in(base: Path) -> dict[str, tuple[int, int]]:
    weights = load_file(base / "model.safetensors")
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if name.removesuffix(".weight").endswith(MODULES)
    }


def changed(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter with further tensors and entries."""
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), **{PREFIX + name: tensor for name, tensor in tensors.items()}}, file)
    entries = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**entries, **config}))
    return folder


def test_the_merged_checkpoint_answers_as_the_adapter_does(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", shapes_in(base), rank=6, use_rslora=True)
    assert main(["lite", "merge_lora", str(base), "--adapter", str(adapter), "--work-dir", str(tmp_path / "out")]) == 0
    assert "written to" in capsys.readouterr().out
    prompt = [5, 9, 7, 30, 2]
    with Pipeline(str(base), EngineConfig(**CPU, adapters={"a": str(adapter)})) as pipe:  # type: ignore[arg-type]
        unmerged, bare = pipe.get_logits(prompt, adapter_name="a"), pipe.get_logits(prompt)
    with Pipeline(str(tmp_path / "out"), EngineConfig(**CPU)) as pipe:  # type: ignore[arg-type]
        merged = pipe.get_logits(prompt)
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, bare, atol=1e-2)


def test_dora_embeddings_and_saved_modules(base: Path, tmp_path: Path) -> None:
    shapes, weights = shapes_in(base), load_file(base / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", shapes, rank=4)
    first, second = list(shapes)[:2]
    magnitude, head = torch.rand(shapes[first][0]) + 0.5, torch.randn_like(weights["lm_head.weight"])
    tokens, hidden = weights["model.embed_tokens.weight"].shape
    a, b = torch.randn(4, tokens), torch.randn(hidden, 4)
    more = {
        f"{first}.lora_magnitude_vector": magnitude,
        "lm_head.weight": head,
        "model.embed_tokens.lora_embedding_A": a,
        "model.embed_tokens.lora_embedding_B": b,
        "model.embed_tokens.base_layer.weight": weights["model.embed_tokens.weight"].clone(),
    }
    names = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    changed(adapter, more, use_dora=True, modules_to_save=["lm_head"], target_modules=[*names, "embed_tokens"])
    found = load_file(merge_lora(base, str(tmp_path / "out"), adapter=str(adapter)) / "model.safetensors")
    assert found.keys() == weights.keys()
    scaled = weights[f"{first}.weight"] + delta(first, shapes[first])
    expected = {
        f"{first}.weight": scaled * (magnitude / scaled.norm(dim=1)).unsqueeze(1),
        f"{second}.weight": weights[f"{second}.weight"] + delta(second, shapes[second]),
        "lm_head.weight": head,
        "model.embed_tokens.weight": weights["model.embed_tokens.weight"] + 2.0 * (b @ a).t(),
    }
    for name, tensor in weights.items():
        if name not in expected and name.removesuffix(".weight") not in shapes:
            assert torch.equal(found[name], tensor), name
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("qwen2_vl", {"model.language_model.": "model.", "model.visual.": "visual."}),
        ("llava", {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}),
    ],
)
def test_towers_and_decoders_of_images_models(kind: str, stored: dict[str, str], tmp_path: Path) -> None:
    """By the names that transformers has for modules, which are not those of the files."""
    base = vlm_folder(kind)
    weights = load_file(base / "model.safetensors")
    shapes, named = {}, {}
    for module, in_files in stored.items():
        name = next(
            each
            for each, tensor in weights.items()
            if each.startswith(in_files)
            and each.endswith(".weight")
            and ".layers.1." in each.replace("blocks", "layers")
            if tensor.dim() == 2
        )
        key = module + name.removeprefix(in_files).removesuffix(".weight")
        shapes[key], named[key] = tuple(weights[name].shape), name
    adapter = write_adapter(tmp_path / "adapter", shapes)
    found = load_file(merge_lora(base, str(tmp_path / "out"), adapter=str(adapter)) / "model.safetensors")
    changed_names = {name for name, tensor in weights.items() if not torch.equal(tensor, found[name])}
    assert changed_names == set(named.values())
    for key, name in named.items():
        torch.testing.assert_close(found[name], weights[name] + delta(key, shapes[key]), rtol=1e-5, atol=1e-5)


def test_biases_and_modules_by_their_trainings_names(tmp_path: Path) -> None:
    base = build_checkpoint("qwen2", tmp_path / "base", vocab_size=320)
    weights = load_file(base / "model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "adapter", {module: tuple(weights[f"{module}.weight"].shape)})
    bias, norm = torch.randn_like(weights[f"{module}.bias"]), torch.randn_like(weights["model.norm.weight"])
    more = {f"{module}.base_layer.bias": bias, "model.norm.modules_to_save.default.weight": norm}
    changed(adapter, more, bias="lora_only", modules_to_save=["norm"])
    found = load_file(merge_lora(base, str(tmp_path / "out"), adapter=str(adapter)) / "model.safetensors")
    assert torch.equal(found[f"{module}.bias"], bias)
    assert torch.equal(found["model.norm.weight"], norm)


@pytest.mark.parametrize(
    ("tensors", "config", "error", "match"),
    [
        ({"model.layers.9.mlp.down_proj.lora_A.weight": (4, 4)}, {}, InvalidCheckpoint, "has no 'model.layers.9"),
        ({"lm_head.weight": (321, 64)}, {"modules_to_save": ["lm_head"]}, UnsupportedModel, "another size"),
        ({"model.layers.0.mlp.up_proj.lora_A.weight": (4, 64)}, {}, InvalidCheckpoint, "not both"),
        ({"model.layers.0.mlp.up_proj.lora_B.bias": (96,)}, {}, UnsupportedModel, "not merged"),
        ({}, {"layer_replication": [[0, 1]]}, UnsupportedModel, "layer_replication"),
        ({}, {"r": 5}, InvalidCheckpoint, "rank 5"),
        ({"model.layers.0.mlp.experts.lora_A.weight": (4, 64)}, {}, InvalidCheckpoint, "not both"),
        (
            {f"model.layers.0.mlp.experts.lora_{factor}.weight": (4, 4) for factor in "AB"},
            {"target_parameters": ["mlp.experts.w1"]},
            UnsupportedModel,
            "not known here",
        ),
        (
            {f"model.layers.0.mlp.experts.lora_{factor}.weight": (4, 4) for factor in "AB"},
            {"target_parameters": ["down_proj"]},
            InvalidCheckpoint,
            "no experts where",
        ),
        (
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 64)},
            {"trainable_token_indices": [1, 320]},
            InvalidCheckpoint,
            "not the tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    base: Path,
    tmp_path: Path,
    tensors: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    error: type[AsyncLLMError],
    match: str,
) -> None:
    adapter = write_adapter(tmp_path / "adapter", shapes_in(base))
    changed(adapter, {name: torch.zeros(shape) for name, shape in tensors.items()}, **config)
    with pytest.raises(error, match=match):
        merge_lora(base, str(tmp_path / "out"), adapter=str(adapter))
    assert [each.name for each in tmp_path.iterdir()] == ["adapter"]


def test_settings_are_checked(base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="no option 'w_bits'"):
        merge_lora(base, str(tmp_path / "out"), adapter="x", w_bits=4)
    with pytest.raises(InvalidParameter, match="adapter is not given"):
        merge_lora(base, str(tmp_path / "out"), adapter="")
