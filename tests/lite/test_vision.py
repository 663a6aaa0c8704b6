"""Vision-language models: the decoder is quantized, and tower and projector are copied and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm import GenerationConfig, UnsupportedModel, lite
from asyncllm.pipeline import Pipeline
from tests.models.parity import random_tokens
from tests.vl.checkpoints import folder_of, picture
from tests.vl.layouts import original_llava, remote_intern

TEXTS = [random_tokens(seed, 100) for seed in range(11)]
GREEDY = GenerationConfig(max_new_tokens=1, temperature=0, ignore_eos=True, logprobs=20)

KINDS: list[tuple[str, Callable[..., Any] | None, str, dict[str, Any], list[str]]] = [
    ("llava", None, "auto_awq", {"w_group_size": -1, "texts": TEXTS}, ["vision_tower", "multi_modal_projector"]),
    ("llava", None, "auto_gptq", {"w_group_size": -1, "texts": TEXTS}, ["vision_tower", "multi_modal_projector"]),
    ("llava", original_llava, "smooth_quant", {"texts": TEXTS}, ["model.vision_tower", "model.mm_projector"]),
    ("qwen2_vl", None, "smooth_quant", {"texts": TEXTS}, ["visual"]),
    ("internvl", remote_intern, "smooth_quant", {"texts": TEXTS, "quant_dtype": "fp8"}, ["vision_model", "mlp1"]),
    ("minicpm_v_2_6", None, "smooth_quant", {"texts": TEXTS}, ["vpm", "resampler"]),
    ("deepseek_vl2", None, "blocked_fp8", {}, ["vision", "projector"]),
    ("gemma3", None, "blocked_fp8", {}, ["vision_tower", "multi_modal_projector"]),
]
"""Checkpoint, its layout, tool and options, and the beginnings of what stays."""


def written_as(kind: str, layout: Callable[..., Any] | None, folder: Path) -> Path:
    folder.mkdir()
    source = folder_of(kind)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if layout is not None:
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
        fields, tensors = layout(fields, load_file(source / "model.safetensors"))
        if (tower := fields.pop("vit/tiny", None)) is not None:
            (folder / "vit" / "tiny").mkdir(parents=True)
            (folder / "vit" / "tiny" / "config.json").write_text(json.dumps(tower), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def copied_modules(tensors: dict[str, torch.Tensor]) -> set[str]:
    """The modules with an unquantized matrix, without embeddings."""
    matrices = {name for name, each in tensors.items() if each.ndim == 2 and each.element_size() > 1}
    return {name.removesuffix(".weight") for name in matrices if name.endswith(".weight") and "embed" not in name}


def likeliest(folder: Path) -> list[dict[int, float]]:
    """The first token's log-probabilities about two images."""
    with Pipeline(str(folder)) as pipe:
        responses = pipe([("what is this?", picture(seed)) for seed in (1, 2)], gen_config=GREEDY)
    assert isinstance(responses, list)
    assert all(each.logprobs for each in responses)
    return [each.logprobs[0] for each in responses if each.logprobs]


@pytest.mark.parametrize(("kind", "layout", "tool", "options", "kept"), KINDS)
def test_the_decoder_is_quantized_and_what_sees_is_not(
    kind: str, layout: Callable[..., Any] | None, tool: str, options: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    source, folder = written_as(kind, layout, tmp_path / "source"), tmp_path / "written"
    lite.TOOLS[tool](source, str(folder), **options)
    before, after = (load_file(each / "model.safetensors") for each in (source, folder))
    of_tower = [name for name in before if name.startswith(tuple(f"{part}." for part in kept))]
    assert {part for part in kept for name in of_tower if name.startswith(part)} == set(kept)
    for name in of_tower:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])
    projections = [name for name in before if re.search(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$", name)]
    projections = [name for name in projections if name not in of_tower]
    assert projections
    assert not any(name in after and after[name].dtype == before[name].dtype for name in projections)
    said, fields = (json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (source, folder))
    settings = fields.pop("quantization_config")
    assert fields == said
    if tool == "auto_gptq":
        assert {name.split(".")[0] for name in settings["modules_in_block_to_quantize"][0]} == {"self_attn", "mlp"}
    else:
        plain = settings["modules_to_not_convert"]
        assert set(kept) <= set(plain)
        weights = {name.removesuffix(".weight") for name in of_tower if "_proj.weight" in name or "fc1.weight" in name}
        assert weights <= set(plain)
        assert copied_modules(after) <= set(plain)
        assert not any(part in name for part in plain for name in projections)
    answers = zip(likeliest(source), likeliest(folder), strict=True)
    assert all(max(abs(one[token] - other[token]) for token in one.keys() & other) < 1 for one, other in answers)


def test_parts_that_are_left_out_are_named_too(tmp_path: Path) -> None:
    """The tower of sounds."""
    lite.blocked_fp8(folder_of("qwen3_omni"), str(tmp_path / "written"))
    settings = json.loads((tmp_path / "written" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    copied = copied_modules(load_file(tmp_path / "written" / "model.safetensors"))
    assert any(name.startswith("audio_tower.") for name in copied)
    assert copied <= set(settings["modules_to_not_convert"])


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "internvl", "gemma3"])
def test_transformers_takes_the_same_modules_for_quantized(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.quantizers.quantizers_utils import should_convert_module

    lite.blocked_fp8(folder_of(kind), str(tmp_path / "written"))
    config = AutoConfig.from_pretrained(tmp_path / "written")
    plain = config.quantization_config["modules_to_not_convert"]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    taken = {
        name: bool(should_convert_module(name, plain))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert set(taken.values()) == {True, False}
    assert taken == {name: ".language_model." in name for name in taken}


@pytest.mark.parametrize(("kind", "says"), [("cogvlm2", "weights of their own"), ("glm4v_9b", "among the decoder's")])
def test_towers_that_cannot_be_told_apart(kind: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        lite.TOOLS["smooth_quant"](folder_of(kind), str(tmp_path / "written"), texts=TEXTS)
