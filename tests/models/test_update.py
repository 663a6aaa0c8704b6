"""Weights that are replaced in a model: all at once or none, in place, by the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from asyncllm.errors import InvalidParameter
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.load_plan import plan_update
from tests.checkpoints import build_checkpoint
from tests.models.parity import FAMILIES, Case, folder_of, hub_model


def open_cpu(folder: Path) -> DecoderLM:
    return open_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def parameters(model: DecoderLM) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def update(model: DecoderLM, tensors: dict[str, Any], **options: bool) -> None:
    plan_update(model, tensors, model.weight_map, **options)()


@pytest.mark.parametrize("family", [*FAMILIES, "axk1_published"])
def test_every_kind_of_weight_becomes_that_of_the_other_checkpoint(family: str, tmp_path: Path) -> None:
    """Fused, stacked, tied and grouped ones, at the addresses where they were."""
    first, second = (build_checkpoint(family, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    model, expected = open_cpu(first), parameters(open_cpu(second))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = parameters(model)
    assert all(not torch.equal(before[name], expected[name]) for name in expected)
    update(model, tensors_of(second))
    after = parameters(model)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "nemotron_h", "kimi_linear", "olmo_hybrid"])
def test_weights_of_a_model_of_transformers_have_the_names_of_files_again(family: str) -> None:
    """As docs/library.md says; other names are refused with the function that undoes them."""
    case = Case(family, "default")
    model, trainer = open_cpu(folder_of(case)), hub_model(case)
    before = parameters(model)
    joined = {name: 2 * tensor for name, tensor in trainer.state_dict().items()}
    if family in ("nemotron_h", "olmo_hybrid"):
        with pytest.raises(InvalidParameter, match="revert_weight_conversion"):
            update(model, joined)
    else:
        update(model, joined, whole=True)
    update(model, revert_weight_conversion(trainer, joined), whole=True)
    after = parameters(model)
    assert not any(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("internlm2")
    return [build_checkpoint("internlm2", root / str(seed), seed=seed) for seed in (0, 1)]


def test_some_weights_alone(folders: list[Path]) -> None:
    model = open_cpu(folders[0])
    before, expected = parameters(model), parameters(open_cpu(folders[1]))
    name = "model.layers.1.feed_forward.w3.weight"
    update(model, {name: tensors_of(folders[1])[name]})
    after = parameters(model)
    fused = "layers.1.mlp.gate_up.weight"
    half = len(before[fused]) // 2
    assert torch.equal(after[fused], torch.cat([before[fused][:half], expected[fused][half:]]))
    assert all(torch.equal(after[each], before[each]) for each in before if each != fused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_they_are_converted_and_may_be_trained_ones(folders: list[Path], dtype: torch.dtype) -> None:
    model, tensors = open_cpu(folders[0]), tensors_of(folders[1])
    update(model, {name: nn.Parameter(tensor.to(dtype)) for name, tensor in tensors.items()})
    name = "model.tok_embeddings.weight"
    assert torch.equal(model.embed.weight, tensors[name].to(dtype).float())
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Sharded(Tensor):
    """Stands for a part of a tensor, as torch.distributed's do."""


EMBEDDINGS = "model.tok_embeddings.weight"


@pytest.mark.parametrize(
    ("name", "made_of", "says"),
    [
        ("model.layers.7.ffn_norm.weight", lambda tensor: tensor, "no place in the model"),
        ("model.layers.0.feed_forward.w9.weight", lambda tensor: tensor, "matches no row"),
        (EMBEDDINGS, lambda tensor: tensor[:-1], r"has shape \[319, 64\].*\[320, 64\]"),
        (EMBEDDINGS, lambda tensor: tensor.long(), "I64"),
        (EMBEDDINGS, lambda tensor: tensor.to(torch.float8_e4m3fn), "F8_E4M3"),
        (EMBEDDINGS, lambda tensor: tensor.to_sparse(), "dense"),
        (EMBEDDINGS, lambda tensor: tensor.to("meta"), "with data"),
        (EMBEDDINGS, lambda tensor: tensor.as_subclass(Sharded), "Sharded"),
        (EMBEDDINGS, lambda tensor: tensor.numpy(), "ndarray"),
    ],
)
def test_one_that_does_not_fit_is_named_and_nothing_is_changed(
    folders: list[Path], name: str, made_of: Callable[[Tensor], Any], says: str
) -> None:
    model, tensors = open_cpu(folders[0]), tensors_of(folders[1])
    before = parameters(model)
    wrong = {**tensors, name: made_of(tensors[EMBEDDINGS])}
    with pytest.raises(InvalidParameter, match=says) as caught:
        update(model, wrong)
    assert caught.value.param == "weights"
    assert f"1 of {len(wrong)} tensors" in str(caught.value)
    assert name in str(caught.value)
    after = parameters(model)
    assert all(torch.equal(after[each], before[each]) for each in before)


def test_the_head_of_a_tied_model_has_to_be_its_embedding(tmp_path: Path) -> None:
    first, second = (build_checkpoint("qwen3", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    model, tensors = open_cpu(first), tensors_of(second)
    before = parameters(model)
    embedding = tensors["model.embed_tokens.weight"]
    for head in (embedding.roll(1, 0), embedding[:-1]):
        with pytest.raises(InvalidParameter, match=r"'lm_head\.weight' differs from the token embedding"):
            update(model, {**tensors, "lm_head.weight": head})
    assert all(torch.equal(parameters(model)[name], before[name]) for name in before)
    update(model, {"lm_head.weight": embedding})
    update(model, {**tensors, "lm_head.weight": embedding.clone()})
    assert torch.equal(model.embed.weight, embedding)


def test_all_that_do_not_fit_are_named(folders: list[Path]) -> None:
    model = open_cpu(folders[0])
    names = ["one.weight", "output.weight", "two.weight"]
    with pytest.raises(InvalidParameter, match="3 of 3 tensors") as caught:
        update(model, dict.fromkeys(names, torch.zeros(3)))
    assert all(name in str(caught.value) for name in names)


def test_the_whole_is_asked_for_where_nothing_is_left(folders: list[Path]) -> None:
    model, tensors = open_cpu(folders[0]), tensors_of(folders[1])
    del tensors["model.norm.weight"], tensors["model.layers.0.attention.wqkv.bias"]
    with pytest.raises(InvalidParameter, match=r"4 of .* norm\.weight"):
        update(model, tensors, whole=True)
    update(model, tensors)
