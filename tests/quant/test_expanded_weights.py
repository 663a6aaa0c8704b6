"""Weights that are expanded as they are read: they are those that numpy makes of the files, in any family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.locate import locate
from asyncllm.models.loading.load_plan import plan_load, plan_update, stream_to
from asyncllm.models.loading.quantized import open_checkpoint
from asyncllm.protocol import Sleep
from tests.agent.tiny_model import Driver, prompt_of
from tests.checkpoints import build_checkpoint
from tests.quant import formats
from tests.quant.expanded_formats import EXPANDED, Expanded
from tests.quant.formats import change, is_projection, write_config
from tests.quant.test_packed_weights import logits_of, open_cpu
from tests.quant.test_residence import EVERYTHING, open_agent
from tests.ranks.threads import in_ranks

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
DOWN = "model.layers.0.mlp.down_proj"


def write(source: Path, folder: Path, fmt: Expanded, quantized: Callable[[str], bool] = is_projection) -> Path:
    """A copy of the checkpoint in `source` with random weights of `fmt`, and below it "plain": the same by numpy."""
    shutil.copytree(source, folder)
    shutil.copytree(source, folder / "plain")
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for seed, (name, tensor) in enumerate(sorted(load_file(source / "model.safetensors").items())):
        if not quantized(name):
            tensors[name] = plain[name] = tensor
            continue
        stored, plain[name] = fmt.random(tensor.shape[0], tensor.shape[1], seed)
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": each for suffix, each in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, fmt.config)
    return folder


def assert_as_read_by_numpy(folder: Path) -> None:
    model, plain = open_cpu(folder), open_cpu(folder / "plain")
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    assert (logits_of(model) - logits_of(plain)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("dense"), **SIZES)


@pytest.mark.parametrize("name", EXPANDED)
def test_a_model_is_the_one_that_numpy_reads(name: str, dense: Path, tmp_path: Path) -> None:
    assert_as_read_by_numpy(write(dense, tmp_path / "model", EXPANDED[name]))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi3", "bnb-nf4-nested"),
        ("internlm2", "bnb-int8"),
        ("qwen3_moe", "nvfp4"),
        ("deepseek_v3", "nvfp4-modelopt"),
        ("deepseek_v2", "bnb-nf4"),
        ("gemma2", "mxfp4"),
    ],
)
def test_fused_tensors_latents_and_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    if family.startswith("deepseek"):
        sizes |= {"q_lora_rank": 32, "kv_lora_rank": 64, "v_head_dim": 32}
    assert_as_read_by_numpy(
        write(build_checkpoint(family, tmp_path / "dense", **sizes), tmp_path / "m", EXPANDED[name])
    )


def test_experts_of_four_bits_in_files_of_eight(tmp_path: Path) -> None:
    """MiMo-V2.6's; without the entry that says so, and with groups of another size, they are refused."""
    dense, fmt = build_checkpoint("mimo_v2", tmp_path / "dense", hidden_size=128), EXPANDED["fp8-mxfp4"]
    folder = write(dense, tmp_path / "model", fmt, lambda name: ".experts." in name)
    assert_as_read_by_numpy(folder)
    for changes, says in (
        ({"store_dtype": None}, r"experts\.0\.\w+\.weight' is U8"),
        ({"store_dtype": "nvfp4"}, "store_dtype"),
        ({"mxfp4_block_size": 16}, "mxfp4_block_size"),
    ):
        write_config(folder, {**fmt.config, **changes})
        with pytest.raises(UnsupportedModel, match=says):
            open_cpu(folder)


def test_one_projection_of_several_and_the_head(dense: Path, tmp_path: Path) -> None:
    """Plain ones of the same layer stay, as in files that leave some out by what they cost."""
    chosen = ("v_proj.weight", "up_proj.weight", "lm_head.weight")
    assert_as_read_by_numpy(write(dense, tmp_path / "model", EXPANDED["bnb-nf4"], lambda name: name.endswith(chosen)))


def test_a_head_that_is_no_copy_of_the_embedding(tmp_path: Path) -> None:
    dense = build_checkpoint("llama", tmp_path / "dense", tie_word_embeddings=True, **SIZES)
    embedding = load_file(dense / "model.safetensors")["model.embed_tokens.weight"]
    change(dense, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    folder = write(dense, tmp_path / "model", EXPANDED["nvfp4"], lambda name: name == "lm_head.weight")
    write_config(folder / "plain", None)
    assert_as_read_by_numpy(folder)


def test_projections_of_several_formats(dense: Path, tmp_path: Path) -> None:
    """Some multiply in 8 bits, others are expanded."""
    both = write(dense, tmp_path / "model", EXPANDED["nvfp4"], lambda name: is_projection(name) and "mlp" in name)
    groups = {
        "group_0": {**EXPANDED["nvfp4"].config["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]},
        "group_1": {**EXPANDED["fp8-channel"].config["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]},
    }
    groups["group_1"]["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    eight, _ = EXPANDED["fp8-channel"].random(128, 128, 0)
    change(
        both,
        lambda tensors: (
            tensors.pop("model.layers.0.self_attn.o_proj.weight"),
            tensors.update({f"model.layers.0.self_attn.o_proj.{suffix}": each for suffix, each in eight.items()}),
        ),
    )
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    write_config(both, settings)
    layers = {
        name: type(each.method).__name__ for name, each in open_cpu(both).named_modules() if hasattr(each, "method")
    }
    assert layers["layers.0.attn.out"] == "Scaled"
    assert layers["layers.0.mlp.down"] == layers["layers.0.attn.qkv"] == "Unquantized"


SERVED: dict[str, formats.Format | formats.Eight] = {
    "awq": formats.awq(32),
    "awq-gemv": formats.awq(64, "gemv"),
    "gptq": formats.gptq(4, 32, symmetric=False, second=True),
    "gptq-ordered": formats.gptq(8, 32, shuffled=True),
    "packed": formats.packed(4, 64, symmetric=False),
    "int8": formats.smooth_quant(),
    "fp8-block": formats.fp8("block"),
    "fp8-static": formats.fp8("tensor", static=True),
}


@pytest.mark.parametrize("name", SERVED)
def test_layers_that_a_method_does_not_serve(name: str, tmp_path: Path) -> None:
    """Experts without a gate, and layers of which a part is plain; both have a method elsewhere."""
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64, "moe_latent_size": 64}
    dense = build_checkpoint("nemotron_h_experts", tmp_path / "experts", **sizes)
    folder = formats.write(dense, tmp_path / "model", SERVED[name], lambda each: ".experts." in each)
    assert (logits_of(open_cpu(folder)) - logits_of(open_cpu(folder / "plain"))).abs().max() < 1e-4

    dense = build_checkpoint("llama", tmp_path / "llama", **SIZES)
    folder = formats.write(dense, tmp_path / "mixed", SERVED[name], lambda each: "k_proj.weight" in each)
    assert (logits_of(open_cpu(folder)) - logits_of(open_cpu(folder / "plain"))).abs().max() < 1e-4
    agent, prompt = open_agent(folder), prompt_of(19)
    expected = Driver(agent).generate(0, prompt, 12)
    agent.carry_out(Sleep(2))
    agent.carry_out(EVERYTHING)
    assert Driver(agent).generate(0, prompt, 12) == expected


def experts_methods(folder: Path, **options: Any) -> list[str]:
    """The methods of a Step 3.5's layers of experts. The model has to run."""
    model = open_cpu(folder, **options)
    assert logits_of(model).isfinite().all()
    return [type(layer.mlp.gate_up.method).__name__ for layer in list(model.layers)[1::2]]


@pytest.mark.parametrize("name", ["fp8-block", "int8"])
def test_experts_with_limits_are_plain_and_others_are_not(name: str, tmp_path: Path) -> None:
    """All experts of a layer are in one tensor, as published."""
    dense = build_checkpoint("step3p5", tmp_path / "dense", moe_intermediate_size=160, hidden_size=128)
    folder = formats.write(dense, tmp_path / "model", SERVED[name], lambda each: ".moe." in each and "proj" in each)
    assert experts_methods(folder) == ["Unquantized", "Unquantized"]
    assert (logits_of(open_cpu(folder)) - logits_of(open_cpu(folder / "plain"))).abs().max() < 1e-4
    for each in (folder, dense):
        file = each / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "swiglu_limits": [0.0, 0.3, 0.0, 0.0, 0.0]}))
    assert experts_methods(folder) == ["Unquantized", "Scaled"]
    assert experts_methods(dense, model_format="fp8") == ["Unquantized", "Scaled"]


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_a_tower_is_expanded(name: str, tmp_path: Path) -> None:
    folder = formats.write(
        locate("tiny-vlm"),
        tmp_path / "model",
        SERVED[name],
        lambda each: "self_attn.q_proj" in each and each.endswith("weight"),
    )
    model, plain = open_cpu(folder), dict(open_cpu(folder / "plain").named_parameters())
    tower = {key: each for key, each in model.named_parameters() if key.startswith("vision.")}
    assert tower.keys() == {key for key in plain if key.startswith("vision.")}
    for key, parameter in tower.items():
        torch.testing.assert_close(parameter, plain[key], rtol=1e-6, atol=1e-7)


def test_an_embedding_of_four_bits(dense: Path, tmp_path: Path) -> None:
    folder = formats.write(dense, tmp_path / "model", formats.gptq(4, 32), lambda each: "embed_tokens" in each)
    assert torch.equal(logits_of(open_cpu(folder)), logits_of(open_cpu(folder / "plain")))


def test_scales_of_an_expanded_layer_are_not_missing(dense: Path, tmp_path: Path) -> None:
    folder = formats.write(dense, tmp_path / "model", formats.awq(32), lambda each: "k_proj.weight" in each)
    change(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.scales"))
    with pytest.raises(InvalidCheckpoint, match=r"k_proj\.scales' is missing"):
        open_cpu(folder)


@pytest.mark.parametrize("name", ["bnb-nf4-nested", "nvfp4"])
def test_two_ranks_give_the_logits_of_one(name: str, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED[name])
    with torch.inference_mode():
        whole = logits_of(open_cpu(folder))
    for share in in_ranks(2, lambda group: logits_of(open_cpu(folder, group=group))):
        torch.testing.assert_close(share, whole, rtol=1e-4, atol=1e-4)


def test_on_a_device_the_files_are_streamed(dense: Path, tmp_path: Path) -> None:
    """What is expanded comes beside it."""
    folder = write(dense, tmp_path / "model", EXPANDED["bnb-nf4-nested"])
    model, expected = open_cpu(folder), dict(open_cpu(folder).named_parameters())
    for parameter in model.parameters():
        parameter.zero_()
    checkpoint = open_checkpoint(folder, model.scheme)
    stream_to(plan_load(model, checkpoint, model.weight_map), checkpoint, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_it_sleeps_and_wakes_and_takes_plain_weights(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED["bnb-nf4"])
    agent, prompt = open_agent(folder), prompt_of(19)
    expected = Driver(agent).generate(0, prompt, 12)
    for level in (1, 2):
        agent.carry_out(Sleep(level))
        agent.carry_out(EVERYTHING)
        assert Driver(agent).generate(0, prompt, 12) == expected
    given = load_file(dense / "model.safetensors")
    plan_update(agent.model, given, agent.model.weight_map)()
    assert torch.equal(logits_of(agent.model), logits_of(open_cpu(dense)))


@pytest.mark.parametrize("name", EXPANDED)
def test_damage_is_named(name: str, dense: Path, tmp_path: Path) -> None:
    """Every tensor of a weight, missing, of another size, of another type, or not a number."""
    folder = write(dense, tmp_path / "model", EXPANDED[name], lambda each: each == f"{DOWN}.weight")
    file = folder / "model.safetensors"
    whole = load_file(file)
    optional = ("input_scale", "input_global_scale", "weight_format", "bias")
    own = [key for key in whole if key.startswith(DOWN) and not key.endswith(optional)]
    assert len(own) >= 2
    for key in own:
        tensor = whole[key]
        damaged: dict[str, Tensor | None] = {"missing": None, "type": torch.zeros(tensor.shape, dtype=torch.bool)}
        damaged["size"] = tensor[:-1] if tensor.ndim and len(tensor) > 1 else tensor.reshape(-1).repeat(3)
        if tensor.dtype == torch.float32:
            damaged |= {"number": torch.full_like(tensor, torch.nan), "infinity": torch.full_like(tensor, torch.inf)}
        for what, other in damaged.items():
            save_file(
                {each: value for each, value in {**whole, key: other}.items() if value is not None},
                file,
                metadata={"format": "pt"},
            )
            with pytest.raises((InvalidCheckpoint, UnsupportedModel)) as caught:
                open_cpu(folder)
            said = str(caught.value)
            assert "mlp.down" in said, (key, what, said)


def test_exponents_that_are_no_numbers(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED["mxfp4"])
    change(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].fill_(255))
    with pytest.raises(InvalidCheckpoint, match=rf"{DOWN}\.weight.*not all numbers"):
        open_cpu(folder)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("bnb-nf4", {"shape": [192]}, "describes no matrix"),
        ("bnb-nf4", {"shape": [128, 0]}, "cannot be"),
        ("bnb-nf4", {"blocksize": "many"}, "describes no matrix"),
        ("bnb-nf4", {"shape": [64, 192]}, r"64 x 192 numbers"),
        ("bnb-nf4-nested", {"nested_blocksize": -256}, "cannot be"),
    ],
)
def test_what_is_beside_four_bits_is_read_with_care(
    name: str, changes: dict[str, Any], says: str, dense: Path, tmp_path: Path
) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED[name])
    state = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"

    def changed(tensors: dict[str, Tensor]) -> None:
        fields = {**json.loads(bytes(tensors[state].tolist())), **changes}
        tensors[state] = torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)

    change(folder, changed)
    with pytest.raises(InvalidCheckpoint, match=says):
        open_cpu(folder)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_scales_that_are_no_exponents(name: str, dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED[name])
    scale = f"{DOWN}.weight_scale"
    change(folder, lambda tensors: tensors.update({scale: tensors[scale].float()}))
    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight_scale' is F32, where U8"):
        open_cpu(folder)


def test_rows_of_one_kind_of_gpu_are_refused(dense: Path, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "model", EXPANDED["bnb-int8"])
    change(folder, lambda tensors: tensors[f"{DOWN}.weight_format"].fill_(2))
    with pytest.raises(InvalidCheckpoint, match=rf"{DOWN}\.weight.*weight_format"):
        open_cpu(folder)
