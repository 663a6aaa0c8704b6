"""What attaches to linear layers: methods that store weights otherwise, and shards by declaration."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.bypass import Bypass, LinearBypass
from asyncllm.layers.joint_mixers import JointMixers
from asyncllm.layers.layer import PartKey
from asyncllm.layers.linear_method import LinearMethod, Weighted
from asyncllm.layers.narrow_values import NarrowValueAttention
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.load_plan import load, plan_update
from tests.models.parity import FAMILIES, Case, Runner, folder_of, open_case, random_tokens


class RowScaled(LinearMethod):
    """Eight bits and a scale for each output feature, made as a checkpoint's floats are read. It fuses nothing."""

    def create(self, layer: Weighted) -> None:
        shape = (*([layer.num_experts] if layer.num_experts else []), layer.out_features)
        layer.codes = nn.Parameter(torch.empty(*shape, layer.in_features, dtype=torch.int8), requires_grad=False)
        layer.row_scales = nn.Parameter(torch.empty(*shape, 1), requires_grad=False)
        layer.offset = nn.Parameter(torch.empty(shape), requires_grad=False) if layer.has_bias else None

    def expected_parts(self, layer: Weighted) -> Mapping[PartKey, tuple[int, ...]]:
        parts: dict[PartKey, tuple[int, ...]] = {}
        for index in range(layer.num_experts) if layer.num_experts else (None,):
            for part, rows in layer.rows.items():
                parts["weight", part, index] = (rows.stop - rows.start, layer.in_features)
                if layer.has_bias:
                    parts["bias", part, index] = (rows.stop - rows.start,)
        return parts

    def load_part(self, layer: Weighted, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        place = layer.rows[part] if index is None else (index, layer.rows[part])
        if suffix == "bias":
            layer.offset[place] = tensor
            return
        layer.row_scales[place] = tensor.abs().amax(-1, keepdim=True) / 127
        layer.codes[place] = (tensor / layer.row_scales[place]).round().to(torch.int8)

    def batch_invariant(self) -> LinearMethod:
        return self

    def whole(self, layer: Weighted) -> Tensor:
        return layer.codes * layer.row_scales

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return kernels.linear(x, self.whole(layer), layer.offset, out=out)

    def embed(self, layer: Weighted, ids: Tensor, scale: float | None) -> Tensor:
        return kernels.embed(ids, self.whole(layer), scale)

    def experts(
        self,
        gate_up: Weighted,
        down: Weighted,
        x: Tensor,
        weights: Tensor,
        expert_ids: Tensor,
        *,
        limit: float | None = None,
    ) -> Tensor:
        assert limit is None
        return kernels.fused_experts(x, self.whole(gate_up), self.whole(down), weights, expert_ids)


def layers_of(model: nn.Module) -> dict[str, Weighted]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Weighted)}


def logits_of(model: DecoderLM, tokens: list[int]) -> Tensor:
    runner = Runner(model, block_size=4)
    row = runner.row(tokens)
    runner.step((row, len(tokens) - 1))
    runner.step((row, 1))
    return row.result


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v2"])
def test_another_method_attaches_to_every_layer_and_no_one_else_notices(family: str) -> None:
    case, method = Case(family, "default"), RowScaled()
    dense = open_case(case)
    with torch.device("meta"):
        model, expected = type(dense)(dense.config), type(dense)(dense.config)
    for layer in layers_of(model).values():
        layer.attach(method)
    for each in (model, expected):
        each.allocate(torch.float32, torch.device("cpu"))
        load(each, Checkpoint.open(folder_of(case)), each.weight_map)
    own = layers_of(expected)
    for name, layer in layers_of(model).items():
        assert layer.codes.dtype == torch.int8
        own[name].weight.copy_(method.whole(layer))
    tokens = random_tokens(3)
    logits = logits_of(model, tokens)
    torch.testing.assert_close(logits, logits_of(expected, tokens))
    assert not torch.allclose(logits, logits_of(dense, tokens), atol=1e-5), "eight bits are not all of them"

    checkpoint = Checkpoint.open(folder_of(case))
    tensors = {name: -tensor.clone() for name, tensor in checkpoint.read(checkpoint.tensors)}
    plan_update(model, tensors, model.weight_map)()
    name, layer = next((name, layer) for name, layer in layers_of(model).items() if name.endswith("attn.out"))
    torch.testing.assert_close(method.whole(layer), -own[name].weight)


SHARDS = {
    "dense": "replicated",
    "embed": "replicated",
    "positions": "replicated",
    "head": "column",
    "attn.qkv": "column",
    "attn.q": "column",
    "attn.q_down": "replicated",
    "attn.kv": "column",
    "attn.kv_down": "replicated",
    **{f"attn.added.{part}.up": "column" for part in "qkv"},
    "attn.gate": "column",
    "attn.out": "row",
    "attn.product": "replicated",
    "dense.gate_up": "column",
    "dense.down": "row",
    "linear": "replicated",
    "mlp.added.up": "column",
    "mlp.gate_up": "column",
    "mlp.up": "column",
    "mlp.down": "row",
    "mlp.product": "replicated",
    "mlp.router": "replicated",
    "mlp.shared_gate": "replicated",
    "mlp.shared.gate_up": "column",
    "mlp.shared.down": "row",
}

WHOLE = (
    "altup.",
    "attn.added.q.down",
    "attn.added.k.down",
    "attn.added.v.down",
    "mlp.added.down",
    "attn.index.",
    "laurel.",
    "layer_input.",
    "layer_inputs.",
    "norm.",
    "spread.",
)
"""What is small, or between streams, is on every rank."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_every_family_says_how_it_may_be_divided(family: str) -> None:
    """So that what a divided layer gives a rank is what the next one takes there."""
    model = open_case(Case(family, "default"))
    layers = {name.replace("attn.attention.", "attn."): layer for name, layer in layers_of(model).items()}
    latent = any(hasattr(block.attn, "kv") for block in model.layers)
    whole = {name for name, module in model.named_modules() if isinstance(module, StateLayer)}
    projections = {"attn.q", "attn.kv"} if latent else {"attn.qkv"}
    inner = "mlp.gate_up" if model.config.gated else "mlp.up"
    states_alone = all(isinstance(block.attn, StateLayer) and block.mlp is None for block in model.layers)
    divided_ones = set() if states_alone else {"mlp.down", *projections, inner}
    assert {"attn.out", *divided_ones} <= {name.split(".", 2)[-1] for name in layers}
    for name, layer in layers.items():
        in_whole = name.rpartition(".")[0] in whole
        key = name.split(".", 2)[-1].removeprefix("second.").removeprefix("shared.")
        in_whole |= key.startswith(WHOLE) or name.startswith(WHOLE)
        assert layer.shard == ("replicated" if in_whole else SHARDS[key]), name
        divided = (
            [layer.in_features] if layer.shard == "row" else [rows.stop - rows.start for rows in layer.rows.values()]
        )
        assert all(size % layer.unit == 0 for size in divided)
    for block in model.layers:
        heads, attn = model.config.head_dim, block.attn
        if isinstance(attn, JointMixers):
            attn = attn.attention
        if hasattr(attn, "kv"):
            assert attn.q.unit == heads
            assert attn.kv.unit == attn.nope_dim + attn.out.unit
            assert attn.q.out_features // heads == attn.kv.out_features // attn.kv.unit
            assert attn.q.out_features // heads == attn.out.in_features // attn.out.unit
        elif attn is not None and not isinstance(attn, StateLayer | Bypass | LinearBypass):
            if isinstance(attn, NarrowValueAttention):
                assert attn.out.unit == attn.value_dim
            else:
                assert attn.qkv.unit == attn.out.unit == attn.head_dim
            assert attn.qkv.rows["q"].stop // attn.head_dim == attn.out.in_features // attn.out.unit
        if block.mlp is None or isinstance(block.mlp, Bypass | LinearBypass):
            continue
        if model.config.gated:
            assert block.mlp.gate_up.rows["gate"].stop == block.mlp.down.in_features
        else:
            assert block.mlp.up.out_features == block.mlp.down.in_features
    owned = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    # A rank has a layer with a state whole.
    owned |= {id(block.attn.sinks.logits) for block in model.layers if getattr(block.attn, "sinks", None) is not None}
    owned |= {id(each) for module in model.modules() if isinstance(module, StateLayer) for each in module.parameters()}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in owned]
    assert all(
        name.rsplit(".", 2)[-2].endswith(("norm", "correction", "act", "altup", "logit_bias", "stream_scale"))
        for name in others
    ), "which every rank has whole"
