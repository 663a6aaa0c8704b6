"""How layers take their parts, and what they do with a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.embedding import Embedding, OutputEmbedding, TiedOutputEmbedding
from asyncllm.layers.linear import Linear, MergedLinear, QKVLinear
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import OffsetRMSNorm, RMSNorm
from asyncllm.models.loading.load_plan import WeightOwner
from tests.layers.steps import step_at

STEP = step_at([0, 1, 2])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: nn.Module) -> dict[tuple[str, str | None, int | None], Tensor]:
    """Load random tensors of the stated shapes, and return them."""
    assert isinstance(layer, WeightOwner)
    parts = {}
    for seed, (key, shape) in enumerate(layer.expected_parts().items()):
        parts[key] = random(*shape, seed=seed)
        layer.load_part(*key, parts[key])
    return parts


def test_linear() -> None:
    layer = Linear(3, 5, shard="replicated", bias=True)
    parts = fill(layer)
    x = random(2, 3, seed=9)
    torch.testing.assert_close(layer(x, STEP), x @ parts["weight", None, None].t() + parts["bias", None, None])


def test_qkv_is_three_linears_in_one() -> None:
    layer = QKVLinear(6, num_heads=4, num_kv_heads=2, head_dim=3, bias=True)
    parts = fill(layer)
    assert {key: tuple(tensor.shape) for key, tensor in parts.items()} == {
        ("weight", "q", None): (12, 6),
        ("weight", "k", None): (6, 6),
        ("weight", "v", None): (6, 6),
        ("bias", "q", None): (12,),
        ("bias", "k", None): (6,),
        ("bias", "v", None): (6,),
    }
    x = random(2, 6, seed=9)
    separate = [x @ parts["weight", name, None].t() + parts["bias", name, None] for name in ("q", "k", "v")]
    torch.testing.assert_close(layer(x, STEP), torch.cat(separate, -1))


def test_merged_linear_refuses_a_tensor_without_a_part() -> None:
    with pytest.raises(ValueError, match="filled by parts"):
        MergedLinear(2, {"gate": 3, "up": 3}).load_part("weight", None, None, torch.zeros(6, 2))


def test_a_part_is_converted_to_the_parameters_dtype() -> None:
    layer = Linear(2, 2, shard="replicated").to(torch.bfloat16)
    layer.load_part("weight", None, None, torch.eye(2, dtype=torch.float16))
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.float(), torch.eye(2))


def test_expert_parts() -> None:
    layer = Weighted(4, {"gate": 2, "up": 2}, shard="column", num_experts=3)
    parts = fill(layer)
    assert len(parts) == 6
    assert torch.equal(layer.weight[2], torch.cat([parts["weight", "gate", 2], parts["weight", "up", 2]]))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(activation: str) -> None:
    mlp = GatedMLP(4, 6, activation=activation, bias=True)
    gate_up, down = fill(mlp.gate_up), fill(mlp.down)
    x = random(3, 4, seed=9)
    gate, up = (x @ gate_up["weight", name, None].t() + gate_up["bias", name, None] for name in ("gate", "up"))
    act = nn.functional.silu(gate) if activation == "silu" else nn.functional.gelu(gate, approximate="tanh")
    expected = (act * up) @ down["weight", None, None].t() + down["bias", None, None]
    torch.testing.assert_close(mlp(x, STEP), expected)


def test_a_gated_mlp_takes_product_and_gate_as_one_op_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    fused = kernels.linear_silu_mul
    monkeypatch.setattr(kernels, "linear_silu_mul", lambda x, weight: (used.append(x.shape), fused(x, weight))[1])
    x = random(3, 4, seed=9)
    mlp = GatedMLP(4, 6)
    fill(mlp.gate_up), fill(mlp.down)
    expected = mlp.down(kernels.silu_mul(mlp.gate_up(x, STEP)), STEP)
    assert torch.equal(mlp(x, STEP), expected)
    assert used == [(3, 4)]
    mlp.gate_up.method = mlp.gate_up.method.batch_invariant()
    torch.testing.assert_close(mlp(x, STEP), expected)
    for other in (GatedMLP(4, 6, bias=True), GatedMLP(4, 6, activation="gelu_tanh")):
        fill(other.gate_up), fill(other.down)
        other(x, STEP)
    assert used == [(3, 4)], "another method, a bias and another gate have no such op"


def test_moe_with_one_expert_is_its_mlp() -> None:
    moe = MoE(4, 6, num_experts=1, routing=kernels.Routing(1, renormalize=True))
    for layer in (moe.router, moe.gate_up, moe.down):
        fill(layer)
    x = random(3, 4, seed=9)
    gate, up = (x @ moe.gate_up.weight[0].t()).chunk(2, -1)
    torch.testing.assert_close(moe(x, STEP), (nn.functional.silu(gate) * up) @ moe.down.weight[0].t())


def test_offset_norm_adds_one_in_float32() -> None:
    norm, plain = OffsetRMSNorm(8, 1e-6), RMSNorm(8, 1e-6)
    weight = 0.01 * random(8).bfloat16()
    norm.load_part("weight", None, None, weight)
    plain.load_part("weight", None, None, 1 + weight.float())
    x = random(2, 8, seed=1)
    assert norm.parameter_dtype == torch.float32
    assert torch.equal(norm(x), plain(x))
    assert torch.equal(norm.weight, 1 + weight.float())


def test_embedding_scale_is_rounded_to_the_models_dtype() -> None:
    embedding = Embedding(4, 3, scale=50.596442562694074).to(torch.bfloat16)
    embedding.load_part("weight", None, None, torch.ones(4, 3))
    assert embedding(torch.tensor([1]), STEP).tolist() == [[50.5, 50.5, 50.5]]


def test_output_embedding_gives_capped_float32_logits() -> None:
    head = OutputEmbedding(3, 4, softcap=2.0).to(torch.bfloat16)
    fill(head)
    x = random(2, 3, seed=9).bfloat16()
    logits = head(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, 2 * torch.tanh((x @ head.weight.t()).float() / 2))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_in_a_given_tensor(softcap: float | None) -> None:
    embedding = Embedding(4, 3).to(torch.bfloat16)
    x = random(2, 3, seed=9).bfloat16()
    for head in (
        OutputEmbedding(3, 4, softcap=softcap).to(torch.bfloat16),
        TiedOutputEmbedding(embedding, softcap=softcap),
    ):
        fill(embedding if isinstance(head, TiedOutputEmbedding) else head)
        rows = torch.full((3, 4), torch.nan, dtype=head(x).dtype)
        assert head.of_rank(x, rows[:2]).data_ptr() == rows.data_ptr()
        assert torch.equal(rows[:2], head(x))
        assert rows[2].isnan().all()


def test_tied_output_embedding_owns_no_parameter() -> None:
    embedding = Embedding(4, 3)
    fill(embedding)
    head = TiedOutputEmbedding(embedding)
    assert list(head.parameters()) == []
    x = random(2, 3, seed=9)
    torch.testing.assert_close(head(x), x @ embedding.weight.t())
