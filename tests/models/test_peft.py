"""Adapters that PEFT itself has made and saved, against PEFT's own forward pass: every shape loads as it is meant, or
is refused by the name of its entry."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm.errors import UnsupportedModel
from asyncllm.lite import merge_lora
from asyncllm.models.build import open_model
from asyncllm.models.loading.adapter_files import AdapterFiles
from tests.models.parity import Case, folder_of, hub_model, open_case, random_tokens
from tests.models.test_adapters import TOKENS, pooled, run

peft = pytest.importorskip("peft")

ALL: dict[str, Any] = {"target_modules": "all-linear"}
SOME: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}

TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**ALL, "use_rslora": True, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"^model.*k_proj": 3}}),
    ("llama", {**ALL, "exclude_modules": r".*\.mlp\..*"}),
    ("llama", {**SOME, "layers_to_transform": [1], "init_lora_weights": "gaussian", "lora_alpha": 12.5}),
    ("llama", {"target_modules": r".*\.(q_proj|down_proj)", "init_lora_weights": "orthogonal"}),
    ("gpt2", {**ALL, "fan_in_fan_out": True}),
    ("phi3", ALL),
    ("falcon", ALL),
    ("gemma2", ALL),
    ("qwen3_moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**SOME, "use_dora": True}, "use_dora"),
    ({**SOME, "lora_bias": True}, "lora_bias"),
    ({**SOME, "bias": "all"}, "bias is 'all'"),
    ({**SOME, "modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({**SOME, "trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({**SOME, "layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({**SOME, "target_parameters": ["self_attn.o_proj.weight"]}, "target_parameters.*Merge the adapter"),
    ({**SOME, "init_lora_weights": "pissa"}, "init_lora_weights"),
    ({**SOME, "init_lora_weights": "olora"}, "init_lora_weights"),
    ({**SOME, "alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding"),
    ({"target_modules": ["q_proj", "lm_head"]}, "head"),
]


def trained(family: str, folder: Path, fields: dict[str, Any]) -> Any:
    """A PEFT model with random factors, saved to `folder`."""
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(hub_model(Case(family, "default"))), config)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name or "trainable_tokens" in name:
                generator = torch.Generator().manual_seed(number)
                parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("family", "fields"), TAKEN)
def test_logits_are_pefts(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    model, tokens = trained(family, tmp_path, fields), random_tokens(3, TOKENS)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        with model.disable_adapter():
            base = model(torch.tensor([tokens])).logits[0]
    with pooled(open_case(Case(family, "default")), adapters={"a": str(tmp_path)}) as pool:
        pool.put(1, 0)
        plain, adapted = run(pool._model, [tokens, tokens], [-1, 0])
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain, base, rtol=1e-4, atol=1e-4)
    assert (base - expected).abs().max() > 0.05, "the adapter changes something"


def test_embeddings_that_peft_saves_along_change_nothing(tmp_path: Path) -> None:
    case = Case("llama", "default")
    trained("llama", tmp_path, SOME).save_pretrained(tmp_path, save_embedding_layers=True)
    assert {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"} <= set(
        load_file(tmp_path / "adapter_model.safetensors")
    )
    assert AdapterFiles.read(tmp_path, open_case(case), folder_of(case)).layers


EXPERTS: dict[str, Any] = {**SOME, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}

MERGED: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", ALL),
    ("qwen3_moe", {**EXPERTS, "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.down_proj": 3}}),
    ("gpt_oss", EXPERTS),
    ("hy_v3", {**SOME, "target_parameters": ["experts.down_proj"], "use_rslora": True}),
    ("llama", {**SOME, "trainable_token_indices": [5, 9, 200]}),
    ("llama", {**SOME, "trainable_token_indices": {"embed_tokens": [9, 5]}}),
]


@pytest.mark.parametrize(("family", "fields"), MERGED)
def test_what_no_row_can_have_is_merged(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """Experts of checkpoints that hold them one by one, and all in one, and embeddings of single tokens."""
    adapter, case = tmp_path / "adapter", Case(family, "default")
    model, tokens = trained(family, adapter, fields), [5, 9, *random_tokens(3, TOKENS - 2)]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    merged = merge_lora(folder_of(case), str(tmp_path / "merged"), adapter=str(adapter))
    (found,) = run(open_model(merged, dtype=torch.float32, device=torch.device("cpu")), [tokens], [-1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    trained("llama", tmp_path, fields)
    with (
        pytest.raises(UnsupportedModel, match=named),
        pooled(open_case(Case("llama", "default")), adapters={"a": str(tmp_path)}),
    ):
        pass
