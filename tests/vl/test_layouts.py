"""Checkpoints under the names that their authors published them with answer as those of transformers' names do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidCheckpoint, ModelError, UnsupportedModel
from asyncllm.models.build import open_model
from asyncllm.models.refused import REFUSED_MODELS
from asyncllm.models.registry import families
from asyncllm.models.vision.refused import REFUSED_VISION_MODELS
from asyncllm.models.vision_language import VISION_MODELS
from asyncllm.vl.processor import open_processor
from tests.vl import table
from tests.vl.checkpoints import folder_of, picture
from tests.vl.layouts import LAYOUTS, Fields, Tensors, original_llava, remote_intern

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


def rewritten(kind: str, folder: Path, change: Callable[[Fields, Tensors], tuple[Fields, Tensors]]) -> Path:
    shutil.copytree(folder_of(kind), folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    fields, tensors = change(json.loads((folder / "config.json").read_text()), load_file(file))
    tower = fields.pop("vit/tiny", None)
    if tower is not None:
        (folder / "vit/tiny").mkdir(parents=True)
        (folder / "vit/tiny/config.json").write_text(json.dumps(tower))
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


async def answer(folder: Path) -> tuple[list[int], Any]:
    greedy = GenerationConfig(max_new_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    async with AsyncEngine(str(folder), EngineConfig(block_size=8, num_gpu_blocks=128)) as engine:
        response = await engine.generate(("what?", [picture(1), picture(2, 90, 31)]), greedy)
    return response.token_ids, response.logprobs


@pytest.mark.parametrize(("kind", "change", "name"), LAYOUTS)
async def test_other_names_of_the_same(kind: str, change: Any, name: str | None, tmp_path: Path) -> None:
    folder = rewritten(kind, tmp_path, change)
    assert name is None or json.loads((folder / "config.json").read_text())["architectures"] == [name]
    assert await answer(folder) == await answer(folder_of(kind))


def test_deepseeks_other_towers_are_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["MultiModalityCausalLM"], "vision_config": {"cls": "Other"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match="DeepSeek-VL"):
        open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "changed", "error", "says"),
    [
        ("llava", {"vision_feature_layer": 4}, UnsupportedModel, "vision_feature_layer"),
        ("llava", {"vision_feature_layer": []}, UnsupportedModel, "vision_feature_layer"),
        ("llava", {"vision_config": 3}, InvalidCheckpoint, "vision_config"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, UnsupportedModel, "model_type"),
        ("llava", {"text_config": {"model_type": "rwkv"}}, UnsupportedModel, "decoder of 'rwkv'"),
        ("llava", {"architectures": ["LlavaLlamaForCausalLM"]}, UnsupportedModel, "mm_projector_type"),
        (
            "llava",
            {"architectures": ["LlavaLlamaForCausalLM"], "mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "../x"},
            UnsupportedModel,
            "mm_vision_tower",
        ),
        ("llava_next", {"image_grid_pinpoints": [[30, 28]]}, InvalidCheckpoint, "multiples of 28"),
        ("internvl", {"downsample_ratio": 0.25}, UnsupportedModel, "downsample_ratio"),
        (
            "deepseek_vl_hybrid",
            {"high_res_vision_config": {"global_attn_indexes": [12]}},
            InvalidCheckpoint,
            "below 12",
        ),
        ("llama4", {"vision_config": {"pixel_shuffle_ratio": 0.3}}, InvalidCheckpoint, "pixel_shuffle_ratio"),
        ("ovis2", {"vision_config": {"tokenize_function": "gumbel_argmax"}}, UnsupportedModel, "tokenize_function"),
        ("ovis2", {"vision_config": {"hidden_stride": 3}}, UnsupportedModel, "hidden_stride"),
        ("lfm2_vl", {"vision_config": {"num_patches": 26}}, InvalidCheckpoint, "num_patches"),
        ("janus", {"vision_config": {"use_qk_norm": True}}, UnsupportedModel, "model_type|use_qk_norm"),
        ("exaone4_5", {"vision_config": {"num_heads": 6, "hidden_size": 48}}, InvalidCheckpoint, "num_key_value_heads"),
        ("qwen2_vl", {"vision_config": {"num_heads": 5, "embed_dim": 32}}, InvalidCheckpoint, "num_heads"),
        *(
            (kind, {"vision_config": {"rope_parameters": {"rope_theta": 100.0}}}, UnsupportedModel, "rope_theta")
            for kind in ("qwen2_vl", "qwen3_vl", "glm4v", "paddleocr_vl")
        ),
    ],
)
def test_configs_that_are_refused(
    kind: str, changed: Fields, error: type[ModelError], says: str, tmp_path: Path
) -> None:
    folder = rewritten(kind, tmp_path, lambda fields, tensors: ({**fields, **changed}, tensors))
    with pytest.raises(error, match=says):
        open_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_tiles_of_internvl_have_the_towers_size(tmp_path: Path) -> None:
    def larger(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = remote_intern(fields, tensors)
        return {**fields, "force_image_size": 56}, tensors

    with pytest.raises(UnsupportedModel, match="force_image_size = 56"):
        open_model(rewritten("internvl", tmp_path, larger), dtype=torch.float32, device=torch.device("cpu"))


def test_the_projector_of_yi_vl(tmp_path: Path) -> None:
    """Each of its products has a norm behind it."""
    from transformers import AutoModelForImageTextToText, CLIPVisionModel

    generator = torch.Generator().manual_seed(3)
    norms = {f"model.mm_projector.{place}": torch.randn(2, 32, generator=generator) for place in (1, 4)}

    def yi(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = original_llava(fields, tensors)
        for suffix in ("weight", "bias"):
            tensors[f"model.mm_projector.3.{suffix}"] = tensors.pop(f"model.mm_projector.2.{suffix}")
        for name, (weight, bias) in norms.items():
            tensors |= {f"{name}.weight": weight.clone(), f"{name}.bias": bias.clone()}
        return {**fields, "mm_projector_type": "mlp2x_gelu_Norm"}, tensors

    folder = rewritten("llava", tmp_path, yi)
    processor = open_processor(folder)
    assert processor is not None
    image = processor.prepare(picture(1), {})
    model = open_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert model.vision is not None
    oracle = AutoModelForImageTextToText.from_pretrained(folder_of("llava"), dtype=torch.float32).model
    tower, projector = oracle.vision_tower, oracle.multi_modal_projector
    assert isinstance(tower, CLIPVisionModel)
    with torch.inference_mode():
        hidden = tower(torch.from_numpy(image.pixels), output_hidden_states=True).hidden_states[-2][0, 1:]
        hidden = F.layer_norm(projector.linear_1(hidden), (32,), *norms["model.mm_projector.1"])
        expected = F.layer_norm(projector.linear_2(F.gelu(hidden)), (32,), *norms["model.mm_projector.4"])
        torch.testing.assert_close(model.vision.encode([image])[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED_VISION_MODELS)
def test_families_that_are_refused(name: str, tmp_path: Path) -> None:
    fields: Fields = {"architectures": [name], "model_type": "x", "auto_map": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=f"{name}.*nearest"):
        open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_each_class_that_transformers_has_is_read_or_refused_by_name() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    # What acts, reads proteins and guesses blocks of tokens.
    others = {"PI0ForConditionalGeneration", "EvollaForProteinText2Text", "DiffusionGemmaForBlockDiffusion"}
    assert set(CLASSES.values()) <= {*VISION_MODELS, *REFUSED_MODELS, *families(), *others}
    nearest = {each.nearest for each in REFUSED_VISION_MODELS.values()}
    assert nearest <= set(VISION_MODELS)


def test_the_page_of_models_is_that_of_the_code() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.renewed(page), "run python -m tests.vl.table"
