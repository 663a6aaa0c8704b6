"""Scales that move within a layer change nothing that it computes, in any family, and come back to its files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.lite import smoothing
from asyncllm.lite.observed import InputStatistics
from asyncllm.lite.quantize import computes_the_same, quantize
from asyncllm.lite.recipe import Recipe, Rounded
from asyncllm.lite.search import Consumer
from asyncllm.lite.smoothing import Group
from tests.checkpoints import build_checkpoint
from tests.models.parity import random_tokens
from tests.quant.test_packed_weights import logits_of, open_cpu

SEQUENCES = [random_tokens(seed, 40) for seed in range(3)]


class Moving(Recipe):
    """Moves scales that have nothing to do with anything, and rounds nothing."""

    def __init__(self) -> None:
        self.groups = 0
        self.unseen = 0

    def check(self, n: int, k: int) -> None:
        """Anything will do."""

    def scales(self, group: Group, consumers: Sequence[Consumer]) -> Tensor | None:
        self.groups += 1
        return torch.rand(group.size, generator=torch.Generator().manual_seed(self.groups)) * 3 + 0.3

    def round(self, weight: Tensor, inputs: InputStatistics | None) -> Rounded:
        self.unseen += inputs is None
        return Rounded({"weight": weight.clone()}, weight)

    def settings(self, plain: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        return {"plain": plain, "quantized": quantized}


def moved(source: Path, folder: Path) -> tuple[Moving, dict[str, Any]]:
    """Write the copy with moved scales, as a plain checkpoint."""
    recipe = Moving()
    quantize(source, folder, recipe, SEQUENCES, tokens_at_once=64, dtype=torch.float32, device=torch.device("cpu"))
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    settings = fields.pop("quantization_config")
    file.write_text(json.dumps(fields), encoding="utf-8")
    return recipe, settings


FAMILIES = {
    # Three norms and pairs in a layer of the usual kind: both norms, values, and what the gate multiplies.
    "llama": 4,
    "qwen3": 4,  # norms of heads
    "gemma2": 4,  # norms less one, and behind branches
    "internlm2": 4,  # grouped heads in one tensor
    "phi3": 4,  # q, k and v in one tensor, gate and up in another
    "glm4": 4,  # heads in pairs
    "gpt2": 3,  # weights [in, out], biases, a plain MLP
    "gptj": 2,  # parallel branches behind one norm
    "olmo2": 2,  # norms behind branches alone
    "mpt": 2,  # clipped values
    "olmo": 1,  # norms without weights, and clipped values
    "opt": 3,
    "opt_350m": 1,  # norms of the stream
    "nemotron": 3,  # layer norms less one
    "gemma4_31b": 3,  # norms of values, which are the keys in some layers
    "lfm2": 4,  # convolutions between gates, one of which the last product reads
    "lfm3": 4,  # gates of heads, which read the norm too
    "falcon_h1": 5,  # attention beside Mamba-2, whose norm the last product reads
    "mamba": 1,
    "mamba2": 2,
}
"""Groups of a layer."""

KINDS_OF_LAYERS = {
    "deepseek_v32": 18,  # an index, which reads the norm and the bottleneck of queries; an MLP, then experts
    "bailing_moe_v2_5": 40,  # lightning attention, and latent attention
    "bailing_hybrid": 40,  # delta nets, and latent attention with gates of heads, which read the norm too
    "recurrent_gemma": 13,  # recurrences behind convolutions
    "step3p5": 14,  # gated heads, experts with a shared MLP, and limits of what gates multiply
    "longcat_flash": 30,  # two attentions and MLPs, of whose norms some experts return one's features themselves
    "nemotron_h": 8,  # single branches: Mamba-2, attention with values, and MLPs
    "olmo_hybrid": 18,  # gated delta nets behind norms, attention before norms
    "qwen3_5": 20,
    "decilm": 12,  # products or nothing in the place of attention and MLPs
}
"""Groups of a model whose layers differ."""

STATES = ("x_proj", "dt_proj", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "f_b_proj", "f_proj")
"""What decides how long a state is kept."""

CHOICES = ("classifier", "gate", "weights_proj")
"""What chooses experts, and tokens to attend to."""

BESIDE_LAYERS = {"lm_head", "output", "model.decoder.project_in", "model.layers.4.eh_proj"}
"""Matrices of no layer."""


@pytest.mark.parametrize("family", [*FAMILIES, *KINDS_OF_LAYERS])
def test_a_layer_computes_what_it_did(family: str, tmp_path: Path) -> None:
    source = build_checkpoint(family, tmp_path / "source")
    recipe, settings = moved(source, tmp_path / "moved")
    layers = len(open_cpu(source).layers)
    assert recipe.groups == (KINDS_OF_LAYERS[family] if family in KINDS_OF_LAYERS else FAMILIES[family] * layers)
    before, after = logits_of(open_cpu(source)), logits_of(open_cpu(tmp_path / "moved"))
    assert (after - before).abs().max() < 2e-5 * before.abs().max()
    precise = {*STATES, *CHOICES}
    plain = {name for name in settings["plain"] if name.rpartition(".")[2] not in precise}
    # The last experts of LongCat compute nothing.
    assert {
        name for name in plain if "longcat" not in family or not re.search(r"experts\.[678]\.", name)
    } <= BESIDE_LAYERS
    assert not {name.rpartition(".")[2] for name in settings["quantized"]} & precise


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe", "qwen3_next", "nemotron_h_experts"),
        *("gpt_oss", "llama4", "dbrx", "gemma4_26b", "kimi_linear", "lara_mini"),
        *("mimo_v2_flash", "minimax"),
    ],
)
def test_experts_and_routers_take_part(family: str, tmp_path: Path) -> None:
    source = build_checkpoint(family, tmp_path / "source")
    _, settings = moved(source, tmp_path / "moved")
    assert any(name.endswith(("gate", "router", "router.layer", "router.proj")) for name in settings["plain"])
    assert any(re.search(r"experts\.(mlp\.)?\d", name) for name in settings["quantized"])
    before, after = logits_of(open_cpu(source)), logits_of(open_cpu(tmp_path / "moved"))
    assert (after - before).abs().max() < 5e-5 * before.abs().max()


def test_what_changes_a_layer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_checkpoint("llama", tmp_path / "source")

    def wrong(block: Any) -> Any:
        # The norm of one branch, and the projections of the other.
        return [Group(block.mlp_norm, (smoothing.Matrix(block.attn.qkv),))]

    monkeypatch.setattr("asyncllm.lite.quantize.groups", wrong)
    with pytest.raises(ModelError, match="layer 0 changed what it computes"):
        moved(source, tmp_path / "moved")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["source"]


def test_another_choice_of_experts_is_no_change_of_the_layer() -> None:
    """The last bit of a router's input makes it, for a few tokens."""
    given, change = torch.randn(2, 200, 16, generator=torch.Generator().manual_seed(0))
    before = given + change
    few = before.clone()
    few[::20] += 1
    assert computes_the_same(before, few, given)
    assert computes_the_same(before, before + 1e-5, given)
    assert not computes_the_same(before, before + 1e-2, given)
    assert not computes_the_same(before, torch.where(torch.arange(200)[:, None] % 5 == 0, few + 1, before), given)
    assert not computes_the_same(before, before * torch.nan, given)
