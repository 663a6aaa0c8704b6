"""Tests of the parity tests: one detail wrong at a time, and the logits must leave the tolerance by far."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch

from asyncllm import kernels
from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.models.decoder import DecoderLM
from tests.models.parity import PROMPT, TOKENS, Case, Runner, open_case, random_tokens, reference

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
        ropes = (msgspec.structs.replace(rope, **changes) for rope in model.config.ropes)
        model.rotaries = torch.nn.ModuleList(RotaryEmbedding(rope, torch.device("cpu")) for rope in ropes)

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


def forget_offset_before_attention(model: DecoderLM) -> None:
    model.layers[0].attn_norm.weight.sub_(1)


def drop_mlp_bias(model: DecoderLM) -> None:
    model.layers[0].mlp.down.bias.zero_()


def take_silu(model: DecoderLM) -> None:
    for layer in model.layers:
        layer.mlp.activation = "silu"


def lengthen_a_row_of_the_head(model: DecoderLM) -> None:
    """What a head whose rows keep their stored lengths does to each of them."""
    model.head.weight[7] *= 1.2


def turn_whole_heads(model: DecoderLM) -> None:
    with_rope(dim=model.config.head_dim)(model)


def swap_norms(model: DecoderLM) -> None:
    first = model.layers[0]
    first.attn_norm, first.mlp_norm = first.mlp_norm, first.attn_norm


def slide_everywhere(model: DecoderLM) -> None:
    for layer in model.layers:
        layer.attn.window = 8


def forget_embedding_scale(model: DecoderLM) -> None:
    model.embed.scale = None


def forget_logit_softcap(model: DecoderLM) -> None:
    model.head.softcap = None


def flip_renormalisation(model: DecoderLM) -> None:
    for layer in model.layers:
        if hasattr(layer.mlp, "routing"):
            layer.mlp.routing = layer.mlp.routing._replace(renormalize=not layer.mlp.routing.renormalize)


def turn_every_layer(model: DecoderLM) -> None:
    for layer in model.layers:
        layer.attn.rope = 0


def forget_branch_scale(model: DecoderLM) -> None:
    for layer in model.layers:
        layer.scale = None


def forget_logit_scale(model: DecoderLM) -> None:
    model.head.scale = None


def swap_post_norms(model: DecoderLM) -> None:
    first = model.layers[0]
    first.attn_post_norm, first.mlp_post_norm = first.mlp_post_norm, first.attn_post_norm


def pair_halves(model: DecoderLM) -> None:
    """Queries and keys as the checkpoint has them, with features that are neighbours in pairs, read as halves."""
    for layer in model.layers:
        qkv, dim = layer.attn.qkv, layer.attn.qkv.paired
        heads = qkv.weight.view(-1, qkv.head_dim, qkv.in_features)[: qkv.num_heads + qkv.num_kv_heads, :dim]
        heads.copy_(heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).clone())


def count_positions_from_0(model: DecoderLM) -> None:
    model.config = msgspec.structs.replace(
        model.config, query_scaling=msgspec.structs.replace(model.config.query_scaling, ahead=0)
    )


def swap_query_heads(model: DecoderLM) -> None:
    """What reading a grouped wqkv as flat q, k, v does to the heads, in small."""
    head_dim = model.config.head_dim
    weight = model.layers[0].attn.qkv.weight
    weight[: 2 * head_dim] = weight[: 2 * head_dim].roll(head_dim, 0).clone()


def in_each_hybrid(change: Callable[[torch.nn.Module], None]) -> Mutation:
    def mutate(model: DecoderLM) -> None:
        for layer in model.layers:
            if hasattr(layer, "shared"):
                change(layer)

    return mutate


def forget_linear(layer: torch.nn.Module) -> None:
    layer.linear.weight.copy_(torch.eye(len(layer.linear.weight)))


def read_nothing_beside_the_stream(layer: torch.nn.Module) -> None:
    layer.shared.attn_norm.weight[len(layer.norm.weight) :] = 0


def scale_by_whole_heads(layer: torch.nn.Module) -> None:
    layer.shared.attn.scale = layer.shared.attn.head_dim**-0.5


def take_silu_in_block(layer: torch.nn.Module) -> None:
    layer.shared.mlp.activation = "silu"


def swap_halves_of_input(model: DecoderLM) -> None:
    weight = model.layers[2].shared.attn.qkv.weight
    weight.copy_(weight.roll(model.config.hidden_size, 1).clone())


def take_the_products_of_another_use(model: DecoderLM) -> None:
    model.layers[3].shared.attn.added = model.layers[1].shared.attn.added
    model.layers[3].shared.mlp.added = model.layers[1].shared.mlp.added


def take_another_block(model: DecoderLM) -> None:
    model.layers[3].shared.attn.qkv = model.layers[2].shared.attn.qkv


def swap_heads_of_states(model: DecoderLM) -> None:
    for parameter in model.layers[1].attn.heads.parameters():
        parameter.copy_(parameter.flip(0))


def join_inputs_and_gates(model: DecoderLM) -> None:
    """As other Mambas have them, one after the other."""
    weight = model.layers[1].attn.inputs.weight
    weight.copy_(weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).clone())


def forget_value_scale(model: DecoderLM) -> None:
    for layer in model.layers:
        layer.attn.qkv.value_scale = 1.0


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
        ("gemma", forget_offset_before_attention),
        ("gemma", forget_embedding_scale),
        ("gemma", take_silu),
        ("qwen", drop_bias),
        ("chatglm", drop_bias),
        ("chatglm", pair_halves),
        ("chatglm", turn_whole_heads),
        ("ernie", drop_mlp_bias),
        ("ernie", pair_halves),
        ("exaone", swap_norms),
        ("exaone4", turn_every_layer),
        ("exaone4", set_attribute("qk_norm", None)),
        ("gemma3", turn_every_layer),
        ("gemma3", set_attribute("q_norm", None)),
        ("gemma3", set_attribute("scale", 24**-0.5)),
        ("gemma3", forget_embedding_scale),
        ("glm", pair_halves),
        ("glm", turn_whole_heads),
        ("glm4", swap_post_norms),
        ("granite", forget_branch_scale),
        ("granite", forget_embedding_scale),
        ("granite", forget_logit_scale),
        ("granite", set_attribute("scale", 16**-0.5)),
        ("hunyuan", set_attribute("qk_norm", "head")),
        ("llama4", set_attribute("q_norm", None)),
        ("llama4", count_positions_from_0),
        ("minicpm", forget_branch_scale),
        ("minicpm", forget_logit_scale),
        ("olmo2", set_attribute("q_norm", None)),
        ("olmo2", swap_post_norms),
        ("olmo3", turn_every_layer),
        ("smollm3", turn_every_layer),
        ("baichuan", lengthen_a_row_of_the_head),
        ("aquila", swap_gate_and_up),
        ("internlm", drop_bias),
        ("internlm", drop_output_bias),
        ("internlm3", drop_mlp_bias),
        ("mimo_v2", forget_value_scale),
        ("mimo_v2", slide_everywhere),
        ("mimo_v2", swap_query_heads),
        ("ministral", slide_everywhere),
        ("phi4_mini", turn_whole_heads),
        ("seed_oss", drop_output_bias),
        ("yi", swap_norms),
        *(
            (family, in_each_hybrid(change))
            for family in ("zamba", "zamba2")
            for change in (
                *(forget_linear, read_nothing_beside_the_stream, scale_by_whole_heads),
                take_silu_in_block,
            )
        ),
        ("zamba", join_inputs_and_gates),
        ("zamba", swap_halves_of_input),
        ("zamba", swap_heads_of_states),
        ("zamba2", swap_halves_of_input),
        ("zamba2", in_each_attention(lambda state: setattr(state.space, "min_step", 0.0))),
        ("zamba2", take_another_block),
        ("zamba2", take_the_products_of_another_use),
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
        ("longrope_long", {"attention_factor": 1.0}),
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


def unpair(model: DecoderLM) -> None:
    set_attribute("interleaved", False)(model)


def forget_mscale(model: DecoderLM) -> None:
    set_attribute("scale", model.config.head_dim**-0.5)(model)


def forget_norm_of_latents(model: DecoderLM) -> None:
    model.layers[0].attn.kv_norm.weight.fill_(1)


def forget_norm_of_queries(model: DecoderLM) -> None:
    model.layers[0].attn.q_norm.weight.fill_(1)


def scale_by_key_without_rotation(model: DecoderLM) -> None:
    set_attribute("scale", model.config.nope_dim**-0.5)(model)


def with_routing(**changes: object) -> Mutation:
    def mutate(model: DecoderLM) -> None:
        model.layers[-1].mlp.routing = model.layers[-1].mlp.routing._replace(**changes)

    return mutate


def choose_without_correction(model: DecoderLM) -> None:
    model.layers[-1].mlp.correction.bias.zero_()


def weigh_with_correction(model: DecoderLM) -> None:
    moe = model.layers[-1].mlp
    rule = moe.routing

    def forward(x: torch.Tensor, step: object) -> torch.Tensor:
        logits = moe.router(x, step)
        _, chosen = kernels.route(logits, rule, moe.correction.bias)
        weights = (logits.sigmoid() + moe.correction.bias).gather(-1, chosen)
        weights = rule.scale * weights / weights.sum(-1, keepdim=True)
        return moe.gate_up.method.experts(moe.gate_up, moe.down, x, weights, chosen) + moe.shared(x, step)

    moe.forward = forward


def forget_shared_experts(model: DecoderLM) -> None:
    model.layers[-1].mlp.shared.down.weight.zero_()


def in_each_index(change: Callable[[torch.nn.Module], None]) -> Mutation:
    return in_each_attention(lambda attention: None if attention.index is None else change(attention.index))


def choose_for_one_layer_alone(model: DecoderLM) -> None:
    """A layer that shares an index attends as the first one does, whichever is nearest."""
    model.layers[2].attn.index.choose = lambda x, compressed, step, *_, **__: step.chosen


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        *(
            (family, mutate)
            for family in ("deepseek_v32", "glm_moe_dsa")
            for mutate in (
                set_attribute("top_k", 10**6),
                set_attribute("top_k", 19),
                set_attribute("top_k", 21),
                in_each_index(lambda index: setattr(index, "interleaved", not index.interleaved)),
                in_each_index(lambda index: index.k_norm.bias.zero_()),
                in_each_index(lambda index: index.k_norm.weight.fill_(1)),
                in_each_index(lambda index: index.weights.weight.abs_()),
                in_each_index(lambda index: index.q.weight.copy_(index.q.weight.roll(24, 0).clone())),
            )
        ),
        ("glm_moe_dsa", choose_for_one_layer_alone),
    ],
)
def test_details_of_an_index(family: str, mutate: Mutation) -> None:
    assert difference(Case(family, "default"), mutate) > CLEARLY_WRONG


@pytest.mark.parametrize(
    ("family", "scaling", "mutate"),
    [
        ("deepseek_v2", "default", unpair),
        ("deepseek_v2", "default", scale_by_key_without_rotation),
        ("deepseek_v2", "default", forget_norm_of_latents),
        ("deepseek_v2", "default", forget_norm_of_queries),
        ("deepseek_v2", "default", with_routing(groups=1, top_groups=1)),
        ("deepseek_v2", "default", with_routing(top_groups=3)),
        ("deepseek_v2", "default", with_routing(group_score="top2")),
        ("deepseek_v2", "default", with_routing(scale=1.0)),
        ("deepseek_v2", "default", forget_shared_experts),
        ("deepseek_v2", "yarn_mscale", forget_mscale),
        ("minicpm3", "default", set_attribute("interleaved", True)),
        ("minicpm3", "default", forget_branch_scale),
        ("minicpm3", "default", forget_logit_scale),
        ("minicpm3", "default", forget_embedding_scale),
        ("deepseek_v3", "default", unpair),
        ("deepseek_v3", "default", with_routing(scores="softmax")),
        ("deepseek_v3", "default", with_routing(group_score="max")),
        ("deepseek_v3", "default", with_routing(renormalize=False)),
        ("deepseek_v3", "default", choose_without_correction),
        ("deepseek_v3", "default", weigh_with_correction),
        ("deepseek_v3", "yarn_mscale", forget_mscale),
    ],
)
def test_details_of_latent_attention_and_its_experts(family: str, scaling: str, mutate: Mutation) -> None:
    assert difference(Case(family, scaling), mutate) > CLEARLY_WRONG
