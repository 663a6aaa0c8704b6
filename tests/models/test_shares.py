"""Every family divided among ranks: together they give the logits of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.errors import UnsupportedModel
from asyncllm.layers.moe import MoE
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from tests.checkpoints import tiny_fields
from tests.models.parity import FAMILIES, Case, Runner, folder_of, open_case, random_tokens
from tests.ranks.threads import ThreadGroup, in_ranks

SPARSE = (
    *("deepseek", "deepseek_v2", "deepseek_v3", "ernie_moe", "glm4_moe", "hunyuan_moe", "llama4", "mixtral", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
"""Families with an even number of experts."""

PROMPT = 21
STEPS = 3


def open_share(case: Case, group: ThreadGroup | None, **options: Any) -> DecoderLM:
    return open_model(
        folder_of(case),
        dtype=torch.float32,
        device=torch.device("cpu"),
        session_len=case.session_len,
        group=group,
        **options,
    )


def logits_of(model: DecoderLM, tokens: list[int]) -> Tensor:
    """A prompt in two chunks, then tokens one by one -> [tokens, vocab]."""
    runner = Runner(model, block_size=8)
    row = runner.row(tokens, prompt_len=PROMPT)
    for count in (13, PROMPT - 13, *[1] * STEPS):
        runner.step((row, count))
    return row.result


@pytest.mark.parametrize("family", [*FAMILIES, "mimo_v2"])
def test_two_ranks_give_the_logits_of_one(family: str) -> None:
    case = Case(family, "default")
    tokens = random_tokens(3, PROMPT + STEPS)
    with torch.inference_mode():
        whole = logits_of(open_case(case), tokens)
    shares = in_ranks(2, lambda group: logits_of(open_share(case, group), tokens))
    assert torch.equal(shares[0], shares[1])
    torch.testing.assert_close(shares[0], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gemma"])
def test_norms_add_up_what_comes_before_them(family: str) -> None:
    """Both sums of each layer, but the one in front of the last layer."""
    case = Case(family, "default")
    folder_of(case)

    def count(group: ThreadGroup) -> tuple[int, int]:
        model = open_share(case, group)
        logits_of(model, random_tokens(3, PROMPT + STEPS))
        return group.fused_sums, 2 * len(model.layers) - 1

    for fused, most in in_ranks(2, count):
        assert fused == (2 + STEPS) * most > 0


@pytest.mark.parametrize("family", ["llama", "cohere", "minimax_m2", "stablelm_12b"])
def test_more_ranks_than_key_heads_have_the_same_ones(family: str) -> None:
    """And their norms, where each head has one of its own."""
    case = Case(family, "default")
    tokens = random_tokens(4, PROMPT + STEPS)
    with torch.inference_mode():
        whole = logits_of(open_case(case), tokens)
    shares = in_ranks(4, lambda group: logits_of(open_share(case, group), tokens))
    assert all(torch.equal(shares[0], share) for share in shares)
    torch.testing.assert_close(shares[0], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SPARSE)
def test_ranks_with_whole_experts_give_the_logits_of_one(family: str) -> None:
    case = Case(family, "default")
    tokens = random_tokens(6, PROMPT + STEPS)
    with torch.inference_mode():
        whole = logits_of(open_case(case), tokens)

    def share(group: ThreadGroup) -> tuple[Tensor, list[int]]:
        model = open_share(case, group, by_expert=True)
        counts = [module.gate_up.num_experts or 0 for module in model.modules() if isinstance(module, MoE)]
        return logits_of(model, tokens), counts

    shares = in_ranks(2, share)
    experts = [module for module in open_case(case).modules() if isinstance(module, MoE)]
    assert shares[0][1] == [(module.gate_up.num_experts or 0) // 2 for module in experts]
    assert torch.equal(shares[0][0], shares[1][0])
    torch.testing.assert_close(shares[0][0], whole, rtol=1e-4, atol=1e-4)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="ep=2: LlamaForCausalLM has no experts"):
        in_ranks(2, lambda group: open_share(Case("llama", "default"), group, by_expert=True))
    count = tiny_fields("mixtral")["num_local_experts"]
    overrides = {"num_local_experts": count}
    with pytest.raises(UnsupportedModel, match=rf"ep=3: {count} experts .* Choose an ep that divides {count}"):
        in_ranks(3, lambda group: open_share(Case("mixtral", "default"), group, by_expert=True, hf_overrides=overrides))


def test_each_rank_has_the_slopes_of_its_heads() -> None:
    case, alibi = Case("falcon", "default"), {"hf_overrides": {"alibi": True}}
    tokens = random_tokens(5, PROMPT + STEPS)
    with torch.inference_mode():
        whole = logits_of(open_share(case, None, **alibi), tokens)
        assert not torch.equal(whole, logits_of(open_case(case), tokens))
    shares = in_ranks(2, lambda group: logits_of(open_share(case, group, **alibi), tokens))
    torch.testing.assert_close(shares[0], whole, rtol=1e-4, atol=1e-4)


def test_a_rank_has_its_share_of_the_parameters() -> None:
    case = Case("llama", "default")
    whole = open_case(case)
    shares = in_ranks(2, lambda group: open_share(case, group))
    for name, parameter in whole.named_parameters():
        sizes = [share.get_parameter(name).numel() for share in shares]
        if "norm" in name or name.startswith("embed") or name.endswith(("out.bias", "down.bias")):
            assert sizes == [parameter.numel()] * 2
        else:
            assert sizes == [parameter.numel() // 2] * 2, name


def test_heads_that_cannot_be_divided_are_refused_with_the_numbers() -> None:
    heads = tiny_fields("llama")["num_attention_heads"]
    with pytest.raises(UnsupportedModel, match=rf"tp=3: a weight of {heads} x .* Choose a tp that divides {heads}"):
        in_ranks(3, lambda group: open_share(Case("llama", "default"), group))
