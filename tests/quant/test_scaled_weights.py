"""Checkpoints of eight bits: what is loaded is what numpy reads in the same files, and activations are rounded too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.errors import AsyncLLMError, InvalidCheckpoint, InvalidParameter, UnsupportedModel
from asyncllm.kernels import ScaledWeight
from asyncllm.kernels.scaled import expand
from asyncllm.layers.linear_method import LinearMethod, Unquantized, Weighted
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.load_plan import plan_update
from asyncllm.quant.scaled import Scaled
from tests.checkpoints import build_checkpoint
from tests.quant.formats import Eight, change, eight, fp8, from_e4m3, smooth_quant, to_e4m3, write, write_config
from tests.quant.test_packed_weights import DOWN, logits_of, open_cpu, replaced, without

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 64}

FORMATS: dict[str, Eight] = {
    "fp8-block": fp8("block"),
    "fp8-tensor": fp8("tensor"),
    "fp8-channel": fp8("channel"),
    "fp8-tensor-static": fp8("tensor", static=True),
    "smooth-int8": smooth_quant(),
    "smooth-fp8": smooth_quant("float8_e4m3fn"),
    "compressed-int8-channel": eight("int8", "channel"),
    "compressed-fp8-tensor-static": eight("e4m3", "tensor", static=True),
    "compressed-fp8-channel": eight("e4m3", "channel"),
    "compressed-fp8-block": eight("e4m3", "block"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("dense"), mlp_bias=False, **SIZES)


def scaled_layers(model: DecoderLM) -> dict[str, Weighted]:
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Weighted)}
    return {name: each for name, each in layers.items() if isinstance(each.method, Scaled)}


def weight_of(layer: Any, index: int | None = None) -> Tensor:
    codes, scales = layer.codes, layer.scales
    if index is not None:
        codes, scales = codes[index], scales[index]
    return expand(ScaledWeight(codes, scales, None), torch.float32)


class RoundedInputs(Unquantized):
    """A plain product of what `layer` makes of its input, by the codes of numpy."""

    product_gated = LinearMethod.product_gated
    product_rope_fill_kv = LinearMethod.product_rope_fill_kv

    def __init__(self, layer: Any) -> None:
        self.integers, self.grouped = layer.codes.dtype == torch.int8, layer.scales.shape[-2] > 1
        self.scale = None if layer.input_scale is None else float(layer.input_scale)

    def product(self, layer: Weighted, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().product(layer, self.rounded(x), out=out)

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
        rows, out = self.rounded(x), torch.zeros_like(x)
        for token, ids in enumerate(expert_ids.tolist()):
            for choice, expert in enumerate(ids):
                hidden = kernels.silu_mul(gate_up.weight[expert] @ rows[token])
                out[token] += weights[token, choice] * (down.weight[expert] @ self.rounded(hidden[None])[0])
        return out

    def rounded(self, x: Tensor) -> Tensor:
        rows, largest = x.numpy().astype(np.float64), 127 if self.integers else 448
        for start in range(0, rows.shape[1], 128 if self.grouped else rows.shape[1]):
            part = rows[:, start : start + (128 if self.grouped else rows.shape[1])]
            scale = np.abs(part).max(1, keepdims=True) / largest if self.scale is None else self.scale
            divided = np.clip(part / scale, -largest, largest)
            part[:] = (np.round(divided) if self.integers else from_e4m3(to_e4m3(divided))) * scale
        return torch.from_numpy(rows).float()


def assert_as_read_by_numpy(folder: Path) -> None:
    model, plain = open_cpu(folder), open_cpu(folder / "plain")
    layers = scaled_layers(model)
    assert layers
    exact = logits_of(plain)
    for name, layer in layers.items():
        expected = plain.get_submodule(name).get_parameter("weight")
        for index in (None,) if layer.num_experts is None else range(layer.num_experts):
            torch.testing.assert_close(weight_of(layer, index), expected if index is None else expected[index])
        plain_layer: Any = plain.get_submodule(name)
        plain_layer.method = RoundedInputs(layer)
    logits, expected = logits_of(model), logits_of(plain)
    # A number between two codes may fall to the other side where sums are taken in another order.
    assert (logits - expected).norm() < 0.1 * (exact - expected).norm(), "activations have eight bits"


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_the_one_that_numpy_reads(name: str, dense: Path, tmp_path: Path) -> None:
    assert_as_read_by_numpy(write(dense, tmp_path / "model", FORMATS[name]))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "fp8-block"),
        ("phi3", "compressed-int8-channel"),
        ("internlm2", "smooth-int8"),
        # Heads are narrower than blocks, of which some have rows of two parts.
        ("internlm2", "fp8-block"),
        ("phi3", "fp8-block"),
        ("deepseek_v3", "fp8-block"),
        # One tensor holds all experts, and one their scales.
        ("granite_moe", "compressed-fp8-channel"),
        ("granite_moe", "smooth-int8"),
    ],
)
def test_fused_tensors_grouped_heads_and_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 128, "head_dim": 64, "mlp_only_layers": []}
    dense = build_checkpoint(family, tmp_path / "dense", **sizes)
    assert_as_read_by_numpy(write(dense, tmp_path / "model", FORMATS[name]))


class InHalves(Eight):
    """Each half of the rows is quantized by itself."""

    def quantize(self, weight: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        halves = [super(InHalves, self).quantize(half, seed) for half in np.split(weight, 2)]
        return {key: np.concatenate([half[key] for half in halves]) for key in halves[0]}

    def decode(self, fmt: Eight, tensors: dict[str, np.ndarray]) -> np.ndarray:
        halves = zip(*(np.split(tensors[key], 2) for key in ("weight", self.scale)), strict=True)
        return np.concatenate([super(InHalves, self).decode(fmt, {"weight": w, self.scale: s}) for w, s in halves])


def test_blocks_of_each_group_of_heads(tmp_path: Path) -> None:
    """MiMo-V2.5's q, k and v of 2 groups, with 136 rows or 176, have 4 rows of scales; a tensor with those of 272 rows,
    or of 352, is refused."""
    dense = build_checkpoint("mimo_v2", tmp_path / "dense", hidden_size=256)

    def is_qkv(name: str) -> bool:
        return name.endswith("qkv_proj.weight")

    assert_as_read_by_numpy(write(dense, tmp_path / "model", InHalves(**vars(fp8("block"))), is_qkv))
    with pytest.raises(InvalidCheckpoint, match=r"qkv_proj\.weight_scale_inv. has shape \[3, 2\], .* for \[4, 2\]"):
        open_cpu(write(dense, tmp_path / "whole", fp8("block"), is_qkv))


def test_norms_and_gates_round_what_they_make(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_cpu(write(dense, tmp_path / "model", FORMATS["fp8-block"]))
    expected = logits_of(model)
    made: list[str] = []

    def counted(name: str, op: Any, *args: Any, **options: Any) -> Any:
        made.append(name)
        return op(*args, **options)

    for name in ("add_rms_norm_rounded", "gate_rounded", "linear_scaled"):
        monkeypatch.setattr(kernels, name, partial(counted, name, getattr(kernels, name)))
    assert torch.equal(logits_of(model), expected)
    # Of the one layer the first norm has nothing to add, and attention's output is rounded by the product.
    norms, gates, products = (made.count(op) for op in ("add_rms_norm_rounded", "gate_rounded", "linear_scaled"))
    assert norms == gates > 0
    assert products == 2 * norms


def test_the_activations_scale_is_the_file_s(dense: Path, tmp_path: Path) -> None:
    """One that is far too small clips them: it is read, and not replaced by one that follows from them."""
    folder = write(dense, tmp_path / "model", FORMATS["compressed-fp8-tensor-static"])
    before = logits_of(open_cpu(folder))
    layer: Any = scaled_layers(open_cpu(folder))["layers.0.mlp.down"]
    assert layer.input_scale.tolist() == pytest.approx([0.02])
    change(folder, replaced("model.layers.0.mlp.down_proj.input_scale", lambda tensor: tensor / 1000))
    assert (logits_of(open_cpu(folder)) - before).abs().max() > 0.01
    change(folder, replaced("model.layers.0.mlp.down_proj.input_scale", lambda tensor: tensor * 0))
    with pytest.raises(InvalidCheckpoint, match=r"down_proj\.input_scale.*scale of 0"):
        open_cpu(folder)


@pytest.mark.parametrize(
    "changes",
    [
        replaced("model.layers.0.mlp.down_proj.weight_scale_inv", lambda tensor: tensor.roll(1, 0)),
        replaced("model.layers.0.mlp.down_proj.weight_scale_inv", lambda tensor: 1 / tensor),
        replaced(
            "model.layers.0.mlp.down_proj.weight", lambda tensor: (tensor.view(torch.uint8) ^ 1).view(tensor.dtype)
        ),
    ],
)
def test_what_is_read_wrongly_is_noticed(changes: Any, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", FORMATS["fp8-block"])
    change(folder, changes)
    with pytest.raises(AssertionError):
        assert_as_read_by_numpy(folder)


DOWN_0 = DOWN.replace("layers.1", "layers.0")


@pytest.mark.parametrize(
    ("name", "changes", "error", "says"),
    [
        ("fp8-block", without(f"{DOWN_0}.weight_scale_inv"), InvalidCheckpoint, r"mlp\.down\.weight_scale_inv"),
        ("fp8-channel", without(f"{DOWN_0}.weight_scale"), InvalidCheckpoint, r"mlp\.down\.weight_scale"),
        ("smooth-int8", without(f"{DOWN_0}.weight"), InvalidCheckpoint, r"mlp\.down\.weight"),
        ("fp8-tensor-static", without(f"{DOWN_0}.input_scale"), InvalidCheckpoint, r"mlp\.down\.input_scale"),
        (
            "fp8-block",
            replaced(f"{DOWN_0}.weight_scale_inv", lambda t: t[:1]),
            InvalidCheckpoint,
            rf"{DOWN_0}.*\[1, 3",
        ),
        ("fp8-block", replaced(f"{DOWN_0}.weight_scale_inv", lambda t: t / 0), InvalidCheckpoint, f"{DOWN_0}.*finite"),
        ("smooth-int8", replaced(f"{DOWN_0}.weight", lambda t: t.int()), UnsupportedModel, f"{DOWN_0}.*I32"),
        (
            "fp8-block",
            replaced(f"{DOWN_0}.weight", lambda t: t.to(torch.float8_e5m2)),
            UnsupportedModel,
            f"{DOWN_0}.*F8_E5M2",
        ),
    ],
)
def test_damaged_tensors_are_named(
    name: str, changes: Any, error: type[AsyncLLMError], says: str, dense: Path, tmp_path: Path
) -> None:
    folder = write(dense, tmp_path / "model", FORMATS[name])
    change(folder, changes)
    with pytest.raises(error, match=says):
        open_cpu(folder)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("fp8-block", {"weight_block_size": [64, 128]}, "weight_block_size"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt"),
        ("fp8-block", {"activation_scheme": "static"}, "activation_scheme"),
        ("fp8-block", {"scale_fmt": "e4m3"}, "scale_fmt"),
        ("fp8-block", {"expert_dtype": "fp4"}, "expert_dtype"),
        ("smooth-int8", {"quant_dtype": "float8_e5m2"}, "quant_dtype"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(
    name: str, changes: dict[str, Any], says: str, dense: Path, tmp_path: Path
) -> None:
    folder = write(dense, tmp_path / "model", FORMATS[name])
    write_config(folder, {**FORMATS[name].config, **changes})
    with pytest.raises(UnsupportedModel, match=says):
        open_cpu(folder)


def test_groups_that_cannot_be_honoured_are_named(dense: Path, tmp_path: Path) -> None:
    fmt = FORMATS["compressed-int8-channel"]
    folder = write(dense, tmp_path / "model", fmt)
    group = fmt.config["config_groups"]["group_0"]
    for changes, says in [
        ({"num_bits": 16}, "num_bits"),
        ({"strategy": "attn_head"}, "strategy"),
        ({"type": "float"}, "type"),
    ]:
        write_config(
            folder, {**fmt.config, "config_groups": {"g": {**group, "weights": {**group["weights"], **changes}}}}
        )
        with pytest.raises(UnsupportedModel, match=f"weights: {says}"):
            open_cpu(folder)


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("weights", {"strategy": "group", "group_size": 256}),
        ("input_activations", {"dynamic": False}),
        ("input_activations", {"strategy": "group"}),
        ("input_activations", {"symmetric": False}),
        ("input_activations", None),
    ],
)
def test_products_that_round_otherwise_take_plain_weights(
    where: str, changes: dict[str, Any] | None, dense: Path, tmp_path: Path
) -> None:
    """The weights are those of the file, and activations stay as they are."""
    fmt = FORMATS["compressed-int8-channel"]
    folder = write(dense, tmp_path / "model", fmt, lambda name: name.endswith("q_proj.weight"))
    group = fmt.config["config_groups"]["group_0"]
    changed = {**group, where: None if changes is None else {**group[where], **changes}}
    write_config(folder, {**fmt.config, "config_groups": {"group_0": changed}})
    assert not scaled_layers(open_cpu(folder))
    torch.testing.assert_close(logits_of(open_cpu(folder)), logits_of(open_cpu(folder / "plain")), rtol=0, atol=1e-5)


def test_plain_weights_are_rounded_as_they_are_read(tmp_path: Path) -> None:
    for family in ("llama", "qwen3_moe"):
        folder = build_checkpoint(family, tmp_path / family)
        model, plain = open_cpu(folder, model_format="fp8"), open_cpu(folder)
        layers = scaled_layers(model)
        kept = {name for name, each in model.named_modules() if isinstance(each, Weighted)} - layers.keys()
        assert kept == {name for name in kept if name in ("embed", "head") or name.endswith("router")}
        for name, layer in layers.items():
            expected = plain.get_submodule(name).get_parameter("weight")
            for index in (None,) if layer.num_experts is None else range(layer.num_experts):
                exact = expected if index is None else expected[index]
                # Three bits of fraction, and a smallest step far below the largest number.
                assert ((weight_of(layer, index) - exact).abs() <= exact.abs() / 16 + exact.abs().amax() / 2**18).all()
        exact = logits_of(plain)
        assert 1e-4 < (logits_of(model) - exact).norm() / exact.norm() < 0.2
    with pytest.raises(InvalidParameter, match="says 'smooth_quant'"):
        open_cpu(write(folder, tmp_path / "smooth", FORMATS["smooth-int8"]), model_format="fp8")


def test_weights_that_were_rounded_here_can_be_replaced(tmp_path: Path) -> None:
    first, second = (build_checkpoint("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    model, expected = open_cpu(first, model_format="fp8"), open_cpu(second, model_format="fp8")
    from asyncllm.models.loading.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(second)
    plan_update(model, {name: tensor.clone() for name, tensor in checkpoint.read()}, model.weight_map)()
    assert torch.equal(logits_of(model), logits_of(expected))


@pytest.mark.parametrize("name", ["fp8-block", "smooth-int8", "compressed-fp8-tensor-static"])
def test_a_weight_comes_with_its_scales(name: str, dense: Path, tmp_path: Path) -> None:
    from asyncllm.models.loading.checkpoint import Checkpoint

    model = open_cpu(write(dense, tmp_path / "model", FORMATS[name]))
    before = logits_of(model)
    other = build_checkpoint("llama", tmp_path / "dense", seed=1, mlp_bias=False, **SIZES)
    folder = write(other, tmp_path / "other", FORMATS[name])
    given = {key: tensor.clone() for key, tensor in Checkpoint.open(folder).read()}
    weight = f"{DOWN_0}.weight"
    scales = [key for key in given if key.startswith(DOWN_0) and key != weight]
    for tensors, match in (
        ({weight: given[weight]}, "only together"),
        ({key: given[key] for key in scales}, "only together"),
        ({weight: given[weight], **{key: given[key] * torch.nan for key in scales}}, "not all finite"),
    ):
        with pytest.raises(InvalidParameter, match=match):
            plan_update(model, tensors, model.weight_map)
    assert torch.equal(logits_of(model), before)
    plan_update(model, given, model.weight_map)()
    assert torch.equal(logits_of(model), logits_of(open_cpu(folder)))
