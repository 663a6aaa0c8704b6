"""The weight-name table, and filling a model by it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.load_plan import load
from asyncllm.models.weights import Target, WeightMap

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 6, 2, 4, 8, 12, 3, 2

TABLE = WeightMap(
    {
        "model.embed_tokens": "embed",
        "model.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q]",
        "model.layers.{i}.self_attn.k_proj": "layers.{i}.attn.qkv[k]",
        "model.layers.{i}.self_attn.v_proj": "layers.{i}.attn.qkv[v]",
        "model.layers.{i}.mlp.gate": "layers.{i}.mlp.router",
        "model.layers.{i}.mlp.experts.{e}.gate_proj": "layers.{i}.mlp.experts.gate_up[gate,{e}]",
        "model.layers.{i}.mlp.experts.{e}.up_proj": "layers.{i}.mlp.experts.gate_up[up,{e}]",
        "model.layers.{i}.mlp.experts.{e}.down_proj": "layers.{i}.mlp.experts.down[{e}]",
        "model.norm": "norm",
        "lm_head": "lm_head",
    },
    ignored=["model.layers.{i}.self_attn.rotary_emb.inv_freq"],
)


class Plain(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float("nan"), dtype=dtype))

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {("weight", None, None): tuple(self.weight.shape)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.get_parameter(suffix).copy_(tensor)


class QKV(nn.Module):
    stored_kv_heads = KV_HEADS
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((sum(self.rows.values()), HIDDEN), float("nan"), dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.full((sum(self.rows.values()),), float("nan"))) if bias else None

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {
            (suffix, part, None): (rows, *parameter.shape[1:])
            for suffix, parameter in self.named_parameters()
            for part, rows in self.rows.items()
        }

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        offset = {"q": 0, "k": self.rows["q"], "v": self.rows["q"] + self.rows["k"]}[str(part)]
        self.get_parameter(suffix).narrow(0, offset, len(tensor)).copy_(tensor)


class Experts(nn.Module):
    def __init__(self, parts: tuple[str | None, ...], out_features: int, in_features: int) -> None:
        super().__init__()
        self.parts, self.out_features = parts, out_features
        self.weight = nn.Parameter(torch.full((EXPERTS, out_features * len(parts), in_features), float("nan")))

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        shape = (self.out_features, self.weight.shape[2])
        return {("weight", part, expert): shape for part in self.parts for expert in range(EXPERTS)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        assert index is not None
        self.weight[index].narrow(0, self.parts.index(part) * self.out_features, self.out_features).copy_(tensor)


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": QKV(bias)})
        experts = {
            "gate_up": Experts(("gate", "up"), INTERMEDIATE, HIDDEN),
            "down": Experts((None,), HIDDEN, INTERMEDIATE),
        }
        self.mlp = nn.ModuleDict({"router": Plain(EXPERTS, HIDDEN), "experts": nn.ModuleDict(experts)})


class Model(nn.Module):
    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed = Plain(16, HIDDEN)
        self.layers = nn.ModuleList([Layer(bias) for _ in range(LAYERS)])
        self.norm = Plain(HIDDEN)
        if not tied:
            self.lm_head = Plain(16, HIDDEN)


def hub_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (16, HIDDEN), "lm_head": (16, HIDDEN)}
    tensors = {"model.norm.weight": torch.randn(HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part, rows in QKV.rows.items():
            shapes[f"{prefix}.self_attn.{part}_proj"] = (rows, HIDDEN)
            tensors[f"{prefix}.self_attn.{part}_proj.bias"] = torch.randn(rows, generator=generator)
        shapes[f"{prefix}.mlp.gate"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part in ("gate", "up"):
                shapes[f"{prefix}.mlp.experts.{expert}.{part}_proj"] = (INTERMEDIATE, HIDDEN)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj"] = (HIDDEN, INTERMEDIATE)
    return tensors | {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.embed_tokens.weight", Target("embed", (("weight", None, None),))),
        ("model.layers.0.self_attn.q_proj.weight", Target("layers.0.attn.qkv", (("weight", "q", None),))),
        ("model.layers.12.self_attn.v_proj.bias", Target("layers.12.attn.qkv", (("bias", "v", None),))),
        (
            "model.layers.3.self_attn.k_proj.lora_A.weight",
            Target("layers.3.attn.qkv", (("lora_A.weight", "k", None),)),
        ),
        ("model.layers.1.mlp.gate.weight", Target("layers.1.mlp.router", (("weight", None, None),))),
        (
            "model.layers.1.mlp.experts.10.up_proj.weight",
            Target("layers.1.mlp.experts.gate_up", (("weight", "up", 10),)),
        ),
        (
            "model.layers.0.mlp.experts.2.down_proj.qweight",
            Target("layers.0.mlp.experts.down", (("qweight", None, 2),)),
        ),
        ("model.layers.7.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_resolve(name: str, target: Target | None) -> None:
    assert TABLE.resolve(name) == target


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "model.embed_tokens",
        "model.embed_tokens.",
        "model.embed_tokensx.weight",
        "xmodel.embed_tokens.weight",
        "model..embed_tokens.weight",
        "model.layers.self_attn.q_proj.weight",
        "model.layers.x.self_attn.q_proj.weight",
        "model.layers.-1.self_attn.q_proj.weight",
        "model.layers.01.self_attn.q_proj.weight",
        "model.layers.²².self_attn.q_proj.weight",
        "model.layers.9999999999.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.q_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq.x",
        "model.layers.0.self_attn.\ud800.weight",
    ],
)
def test_resolve_refuses_what_no_row_names(name: str) -> None:
    with pytest.raises(InvalidCheckpoint, match="matches no row") as caught:
        TABLE.resolve(name)
    assert repr(name) in str(caught.value)
    str(caught.value).encode()


@given(
    kept=st.integers(0, 6),
    rest=st.lists(st.sampled_from(["layers", "self_attn", "q_proj", "weight", "7", "00", "", "{}", "é"]), max_size=3),
)
def test_any_name_resolves_or_is_refused(kept: int, rest: list[str]) -> None:
    name = ".".join(["model", "layers", "0", "self_attn", "q_proj", "bias"][:kept] + rest)
    known = re.fullmatch(r"model\.layers\.(0|7)\.self_attn\.q_proj(\.[^.]+)+", name)
    if known is None:
        with pytest.raises(InvalidCheckpoint, match="matches no row"):
            TABLE.resolve(name)
    else:
        suffix = name.split(".", 5)[5]
        assert TABLE.resolve(name) == Target(f"layers.{known[1]}.attn.qkv", ((suffix, "q", None),))


def test_the_longest_row_wins() -> None:
    table = WeightMap({"model": "whole", "model.head": "head", "model.{i}": "numbered"})
    assert table.resolve("model.head.weight") == Target("head", (("weight", None, None),))
    assert table.resolve("model.body.weight") == Target("whole", (("body.weight", None, None),))
    assert table.resolve("model.3.weight") == Target("numbered", (("weight", None, None),))


def test_derived_tables_leave_the_first_as_it_was() -> None:
    changed = TABLE.replaced({"model.norm": "final_norm"}).without("lm_head").ignoring("lm_head.weight")
    assert changed.resolve("model.norm.weight") == Target("final_norm", (("weight", None, None),))
    assert changed.resolve("lm_head.weight") is None
    assert TABLE.resolve("model.norm.weight") == Target("norm", (("weight", None, None),))
    assert TABLE.resolve("lm_head.weight") == Target("lm_head", (("weight", None, None),))
    with pytest.raises(TypeError):
        TABLE.rows["model.norm"] = "x"  # type: ignore[index]


@pytest.mark.parametrize(
    ("pattern", "target"),
    [
        ("a", "b[]"),
        ("a", "b[q,]"),
        ("a.{i}", "b[q{i}]"),
        ("a.{i}", "b[,{i}]"),
        ("a", "b[q"),
        ("a", "b[q]c"),
        ("a", "b.{i}"),
        ("a", "b[{e}]"),
        ("a", "b[q+k+v:spiral]"),
        ("a..c", "b"),
        ("", "b"),
        ("a.{i", "b"),
        ("a.x{i}", "b"),
        ("a.{i}.{i}", "b"),
    ],
)
def test_a_malformed_table_is_refused(pattern: str, target: str) -> None:
    with pytest.raises(ValueError, match="weight table"):
        WeightMap({pattern: target})


def test_two_patterns_for_the_same_names_are_refused() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        WeightMap({"a.{i}": "x", "a.{j}": "y"})


def test_load_fills_every_part_and_converts_dtypes(tmp_path: Path) -> None:
    tensors = hub_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    model = Model()
    load(model, save(tmp_path, tensors), TABLE)
    for parameter in model.parameters():
        assert not parameter.isnan().any()
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        for suffix in ("weight", "bias"):
            whole = torch.cat([tensors[f"{prefix}.self_attn.{part}_proj.{suffix}"] for part in "qkv"])
            filled = layer.get_submodule("attn.qkv").get_parameter(suffix)
            assert torch.equal(filled, whole.to(filled.dtype))
        for expert in range(EXPERTS):
            parts = [tensors[f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up")]
            assert torch.equal(layer.get_parameter("mlp.experts.gate_up.weight")[expert], torch.cat(parts))
            down = tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"]
            assert torch.equal(layer.get_parameter("mlp.experts.down.weight")[expert], down)


@pytest.mark.parametrize("layout", ["flat", "grouped"])
def test_one_tensor_for_q_k_and_v(tmp_path: Path, layout: str) -> None:
    tensors = hub_tensors()
    expected = {}
    for layer in range(LAYERS):
        for suffix in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{part}_proj.{suffix}" for part in "qkv"]
            q, k, v = expected[layer, suffix] = [tensors.pop(name) for name in names]
            pieces = [q, k, v]
            if layout == "grouped":
                per_group = HEADS // KV_HEADS * HEAD_DIM
                chunks = zip(*map(torch.split, (q, k, v), (per_group, HEAD_DIM, HEAD_DIM)), strict=True)
                pieces = [piece for group in chunks for piece in group]
            tensors[f"model.layers.{layer}.attention.wqkv.{suffix}"] = torch.cat(pieces)
    suffix = "" if layout == "flat" else ":grouped"
    table = TABLE.replaced({"model.layers.{i}.attention.wqkv": f"layers.{{i}}.attn.qkv[q+k+v{suffix}]"})
    model = Model()
    load(model, save(tmp_path, tensors), table)
    for (layer, suffix), parts in expected.items():
        filled = model.layers[layer].get_parameter(f"attn.qkv.{suffix}")
        assert torch.equal(filled, torch.cat(parts).to(filled.dtype))


def test_a_tied_head_is_ignored_whether_stored_or_not(tmp_path: Path) -> None:
    tensors = hub_tensors()
    tied = TABLE.ignoring("lm_head.weight")
    load(Model(tied=True), save(tmp_path, tensors), tied)
    del tensors["lm_head.weight"]
    load(Model(tied=True), save(tmp_path, tensors), tied)
    with pytest.raises(InvalidCheckpoint, match=r"lm_head\.weight"):
        load(Model(), Checkpoint.open(tmp_path), TABLE)


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"model.layers.0.self_attn.o_proj.weight": torch.ones(2)}, InvalidCheckpoint, ["o_proj.weight", "no row"]),
        ({"model.layers.2.self_attn.q_proj.weight": torch.ones(24, 8)}, InvalidCheckpoint, ["layers.2", "no place"]),
        ({"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(12, 8)}, InvalidCheckpoint, ["up,3", "no place"]),
        ({"model.norm.bias": torch.ones(8)}, InvalidCheckpoint, ["model.norm.bias", "no place"]),
        ({Q0: torch.ones(23, 8)}, InvalidCheckpoint, [Q0, "[23, 8]", "[24, 8]"]),
        ({Q0: torch.ones(8, 24)}, InvalidCheckpoint, [Q0, "[8, 24]", "[24, 8]"]),
        ({Q0: torch.ones(24 * 8)}, InvalidCheckpoint, [Q0, "[192]", "[24, 8]"]),
        ({"model.norm.weight": torch.ones(())}, InvalidCheckpoint, ["model.norm.weight", "[]", "[8]"]),
        ({Q0: None}, InvalidCheckpoint, ["layers.0.attn.qkv.weight[q]", "no tensor fills 1 of"]),
        ({"model.norm.weight": None}, InvalidCheckpoint, ["norm.weight", "no tensor fills 1 of"]),
        ({"model.layers.1.mlp.experts.2.up_proj.weight": None}, InvalidCheckpoint, ["gate_up.weight[up,2]"]),
        ({Q0: torch.ones(24, 8, dtype=torch.int8)}, UnsupportedModel, [Q0, "I8"]),
        ({Q0: torch.ones(24, 8, dtype=torch.int32)}, UnsupportedModel, [Q0, "I32"]),
        ({Q0: torch.ones(24, 8, dtype=torch.bool)}, UnsupportedModel, [Q0, "BOOL"]),
        ({Q0: torch.ones(24, 8).to(torch.float8_e4m3fn)}, UnsupportedModel, [Q0, "F8_E4M3"]),
        (
            {"model.layers.0.self_attn.q_proj.qweight": torch.ones(1, dtype=torch.int32)},
            UnsupportedModel,
            ["q_proj.qweight", "I32"],
        ),
    ],
)
def test_load_refuses_a_checkpoint_that_does_not_fit(
    tmp_path: Path, change: dict[str, Tensor | None], error: type[Exception], named: list[str]
) -> None:
    tensors = {name: value for name, value in (hub_tensors() | change).items() if value is not None}
    model = Model()
    with pytest.raises(error) as caught:
        load(model, save(tmp_path, tensors), TABLE)
    for text in [*named, str(tmp_path)]:
        assert text in str(caught.value)
    assert all(parameter.isnan().all() for parameter in model.parameters()), "refused before anything was filled"


def test_missing_parts_are_counted_and_five_are_named(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in hub_tensors().items() if "experts" not in name}
    with pytest.raises(InvalidCheckpoint, match=r"no tensor fills 18 of") as caught:
        load(Model(), save(tmp_path, tensors), TABLE)
    assert str(caught.value).count("experts") == 5


def test_two_tensors_for_one_part_are_refused(tmp_path: Path) -> None:
    tensors = hub_tensors() | {"model.layers.0.attention.wq.weight": torch.ones(24, 8)}
    table = TABLE.replaced({"model.layers.{i}.attention.wq": "layers.{i}.attn.qkv[q]"})
    with pytest.raises(InvalidCheckpoint, match="both fill") as caught:
        load(Model(), save(tmp_path, tensors), table)
    assert Q0 in str(caught.value)
    assert "attention.wq.weight" in str(caught.value)


def test_a_module_that_cannot_be_loaded_is_a_mistake_of_ours(tmp_path: Path) -> None:
    model = Model()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="extra owns parameters"):
        load(model, save(tmp_path, hub_tensors()), TABLE)


def test_a_parameter_without_memory_is_a_mistake_of_ours(tmp_path: Path) -> None:
    model = Model()
    model.norm.to("meta")
    with pytest.raises(ValueError, match="is on the meta device"):
        load(model, save(tmp_path, hub_tensors()), TABLE)


def test_load_leaves_no_file_open(tmp_path: Path) -> None:
    class Full(Plain):
        def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
            raise MemoryError("device full")

    checkpoint = save(tmp_path, hub_tensors())
    before = sorted(os.listdir("/proc/self/fd"))
    load(Model(), checkpoint, TABLE)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    model = Model()
    model.norm = Full(HIDDEN)
    with pytest.raises(MemoryError):
        load(model, checkpoint, TABLE)
    assert sorted(os.listdir("/proc/self/fd")) == before
