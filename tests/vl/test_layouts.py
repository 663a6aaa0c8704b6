"""Checkpoints under the names that their authors published them with answer as those of transformers' names do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidCheckpoint, ModelError, UnsupportedModel
from asyncllm.models.registry import open_model
from tests.vl.checkpoints import folder_of, picture

pytestmark = pytest.mark.anyio

Fields = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def flat_qwen(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    fields["torch_dtype"] = fields.pop("dtype")
    return {**text, **fields}, tensors


def moved_llava(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The names within a running model of transformers 5."""

    def moved(name: str) -> str:
        name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "language_model.")
        return name if name.startswith("lm_head") else f"model.{name}"

    return fields, {moved(name): tensor for name, tensor in tensors.items()}


def old_llava(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return fields, {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()
    }


_INTERN_NAMES = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def remote_intern(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    tower, renamed = fields["vision_config"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem, dot, suffix = name.rpartition(".")
        if "attention.k_proj" in name or "attention.v_proj" in name:
            continue
        if "attention.q_proj" in name:
            parts = [tensors[f"{stem.removesuffix('q_proj')}{part}_proj{dot}{suffix}"] for part in "qkv"]
            name, tensor = f"{stem.replace('attention.q_proj', 'attn.qkv')}{dot}{suffix}", torch.cat(parts)
        for theirs, own in _INTERN_NAMES.items():
            name = name.replace(theirs, own)
        renamed[name] = tensor.contiguous()
    vision = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        **{key: tower[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        "image_size": 28,
        "patch_size": 7,
        "norm_type": tower["norm_type"],
        "qkv_bias": tower["attention_bias"],
        "qk_normalization": tower["use_qk_norm"],
        "layer_norm_eps": tower["layer_norm_eps"],
        "hidden_act": "gelu",
    }
    text = {**fields["text_config"], "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 28,
        "llm_config": text,
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": fields["vision_feature_layer"],
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_thumbnail": True,
        "vision_config": vision,
    }, renamed


def rewritten(kind: str, folder: Path, change: Callable[[Fields, Tensors], tuple[Fields, Tensors]]) -> Path:
    shutil.copytree(folder_of(kind), folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    fields, tensors = change(json.loads((folder / "config.json").read_text()), load_file(file))
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


async def answer(folder: Path) -> tuple[list[int], Any]:
    greedy = GenerationConfig(max_new_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    async with AsyncEngine(str(folder), EngineConfig(block_size=8, num_gpu_blocks=128)) as engine:
        response = await engine.generate(("what?", [picture(1), picture(2, 90, 31)]), greedy)
    return response.token_ids, response.logprobs


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen2_vl", flat_qwen),
        ("qwen2_5_vl", flat_qwen),
        ("llava", moved_llava),
        ("llava", old_llava),
        ("internvl", remote_intern),
        ("internvl_6b", remote_intern),
    ],
)
async def test_other_names_of_the_same(kind: str, change: Any, tmp_path: Path) -> None:
    expected = await answer(folder_of(kind))
    assert await answer(rewritten(kind, tmp_path, change)) == expected


@pytest.mark.parametrize(
    ("kind", "changed", "error", "says"),
    [
        ("llava", {"vision_feature_layer": 0}, UnsupportedModel, "vision_feature_layer"),
        ("llava", {"vision_config": 3}, InvalidCheckpoint, "vision_config"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, UnsupportedModel, "model_type"),
        ("llava", {"text_config": {"model_type": "mamba"}}, UnsupportedModel, "decoder of 'mamba'"),
        ("llava_next", {"image_grid_pinpoints": [[30, 28]]}, InvalidCheckpoint, "multiples of 28"),
        ("internvl", {"downsample_ratio": 0.25}, UnsupportedModel, "downsample_ratio"),
        ("qwen2_vl", {"vision_config": {"num_heads": 5, "embed_dim": 32}}, InvalidCheckpoint, "num_heads"),
    ],
)
def test_configs_that_are_refused(
    kind: str, changed: Fields, error: type[ModelError], says: str, tmp_path: Path
) -> None:
    folder = rewritten(kind, tmp_path, lambda fields, tensors: ({**fields, **changed}, tensors))
    with pytest.raises(error, match=says):
        open_model(folder, dtype=torch.float32, device=torch.device("cpu"))
