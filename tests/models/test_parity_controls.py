"""Tests of the parity tests: one detail wrong at a time, and the logits must leave the tolerance by far."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch

from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.models.decoder import DecoderLM
from tests.models.parity import FAMILIES, PROMPT, TOKENS, Case, Runner, open_case, random_tokens, reference

CLEARLY_WRONG = 1e-2

Mutation = Callable[[DecoderLM], None]


def difference(case: Case, mutate: Mutation) -> float:
    model = copy.deepcopy(open_case(case))
    with torch.no_grad():
        mutate(model)
    tokens = random_tokens(1)
    runner = Runner(model, block_size=16)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    runner.decode(row, TOKENS)
    return (row.result - reference(case, tokens)).abs().max().item()


def with_rope(**changes: object) -> Mutation:
    def mutate(model: DecoderLM) -> None:
        model.rotary = RotaryEmbedding(msgspec.structs.replace(model.config.rope, **changes), torch.device("cpu"))

    return mutate


def in_each_attention(change: Callable[[torch.nn.Module], None]) -> Mutation:
    def mutate(model: DecoderLM) -> None:
        for layer in model.layers:
            change(layer.attn)

    return mutate


def set_attribute(name: str, value: object) -> Mutation:
    return in_each_attention(lambda attention: setattr(attention, name, value))


def drop_bias(model: DecoderLM) -> None:
    model.layers[0].attn.qkv.bias.zero_()


def drop_output_bias(model: DecoderLM) -> None:
    model.layers[0].attn.out.bias.zero_()


def swap_gate_and_up(model: DecoderLM) -> None:
    weight = model.layers[-1].mlp.gate_up.weight
    weight.copy_(weight.roll(weight.shape[-2] // 2, dims=-2).clone())


def forget_norm_offset(model: DecoderLM) -> None:
    model.layers[0].attn_post_norm.weight.sub_(1)


def forget_embedding_scale(model: DecoderLM) -> None:
    model.embed.scale = None


def forget_logit_softcap(model: DecoderLM) -> None:
    model.head.softcap = None


def flip_renormalisation(model: DecoderLM) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "renormalize"):
            layer.mlp.renormalize = not layer.mlp.renormalize


def swap_query_heads(model: DecoderLM) -> None:
    """What reading a grouped wqkv as flat q, k, v does to the heads, in small."""
    head_dim = model.config.head_dim
    weight = model.layers[0].attn.qkv.weight
    weight[: 2 * head_dim] = weight[: 2 * head_dim].roll(head_dim, 0).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_rope_theta(family: str) -> None:
    theta = open_case(Case(family, "default")).config.rope.theta
    assert difference(Case(family, "default"), with_rope(theta=2 * theta)) > CLEARLY_WRONG


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_gate_and_up(family: str) -> None:
    assert difference(Case(family, "default"), swap_gate_and_up) > CLEARLY_WRONG


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "mixtral", "qwen3_moe"])
def test_ignored_window(family: str) -> None:
    assert difference(Case(family, "default"), set_attribute("window", None)) > CLEARLY_WRONG


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "mixtral", "qwen3_moe"])
def test_window_off_by_one(family: str) -> None:
    def widen(attention: torch.nn.Module) -> None:
        attention.window = attention.window and attention.window + 1

    assert difference(Case(family, "default"), in_each_attention(widen)) > CLEARLY_WRONG


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("llama", drop_bias),
        ("llama", drop_output_bias),
        ("qwen2", drop_bias),
        ("internlm2", drop_bias),
        ("internlm2", swap_query_heads),
        ("qwen3", set_attribute("q_norm", None)),
        ("qwen3_moe", set_attribute("k_norm", None)),
        ("qwen3_moe", flip_renormalisation),
        ("mixtral", flip_renormalisation),
        ("gemma2", forget_norm_offset),
        ("gemma2", forget_embedding_scale),
        ("gemma2", forget_logit_softcap),
        ("gemma2", set_attribute("softcap", None)),
        ("gemma2", set_attribute("scale", 24**-0.5)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__qualname__.split(".")[0],
)
def test_dropped_detail(family: str, mutate: Mutation) -> None:
    assert difference(Case(family, "default"), mutate) > CLEARLY_WRONG


@pytest.mark.parametrize(
    ("scaling", "changes"),
    [
        ("linear", {"factor": 1.0}),
        ("dynamic", {"factor": 1.0}),
        ("dynamic", {"original_max_position": 64}),
        ("yarn", {"attention_factor": 1.0}),
        ("yarn", {"factor": 2.0}),
        ("yarn", {"original_max_position": 64}),
        ("yarn_mscale", {"truncate": True}),
        ("yarn_mscale", {"beta_fast": 32.0}),
        ("yarn_mscale", {"beta_slow": 1.0}),
        ("llama3", {"high_freq_factor": 2.0}),
        ("llama3", {"low_freq_factor": 0.5}),
        ("llama3", {"factor": 4.0}),
        ("longrope_short", {"attention_factor": 1.0}),
        ("longrope_long", {"divisors": tuple(1.0 + 0.1 * index for index in range(8))}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_scaling(scaling: str, changes: dict[str, object]) -> None:
    assert difference(Case("llama", scaling), with_rope(**changes)) > CLEARLY_WRONG


def test_base_of_another_prompt_length() -> None:
    """Dynamic scaling that follows the growing context, rather than the prompt, would rotate queries and keys apart."""
    case = Case("llama", "dynamic")
    tokens = random_tokens(1)
    runner = Runner(open_case(case), block_size=16)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    row.prompt_len = TOKENS
    runner.decode(row, TOKENS)
    assert (row.result - reference(case, tokens)).abs().max().item() > CLEARLY_WRONG


def test_block_of_another_row() -> None:
    case = Case("llama", "default")
    tokens = random_tokens(1)
    runner = Runner(open_case(case), block_size=16)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    row.blocks[1] = runner.row(tokens[:16]).blocks[0]
    runner.decode(row, TOKENS)
    assert (row.result - reference(case, tokens)).abs().max().item() > CLEARLY_WRONG
