"""From a folder to a model: families are found, weights loaded, and what does not fit is refused before it hurts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, ModelNotFound, UnsupportedModel
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.refused import REFUSED_MODELS, REFUSED_TEXT_MODELS
from asyncllm.models.registry import families, read_config, register
from asyncllm.models.vision_language import VISION_MODELS
from asyncllm.text.checkpoint_files import BY_MODEL_TYPE
from tests.checkpoints import build_checkpoint
from tests.models.parity import FAMILIES, Runner, random_tokens

CPU = torch.device("cpu")


def open_cpu(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> DecoderLM:
    return open_model(folder, dtype=dtype, device=CPU, **settings)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_two_families_cannot_share_an_architecture() -> None:
    class Other(DecoderLM):
        pass

    with pytest.raises(ValueError, match="LlamaForCausalLM is registered by"):
        register("LlamaForCausalLM")(Other)


def test_refused_decoders_are_told_what_is_near(tmp_path: Path) -> None:
    assert REFUSED_TEXT_MODELS.keys().isdisjoint({*families(), *VISION_MODELS})
    for name, refused in REFUSED_TEXT_MODELS.items():
        assert refused.nearest in {*families(), *VISION_MODELS}
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "x"}))
        with pytest.raises(UnsupportedModel, match=rf"{name}.*not implemented.*nearest.*{refused.nearest}"):
            read_config(tmp_path)


def test_no_refusal_says_that_a_decoder_is_missing_that_there_is() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    types = {family.tiny["model_type"] for family in families().values()} | BY_MODEL_TYPE.keys()
    for model_type, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        refused = REFUSED_MODELS.get(name) if isinstance(name, str) else None
        if refused is not None and "nor its decoder" in refused.why:
            assert CONFIG_MAPPING[model_type]().get_text_config().model_type not in types, name


@pytest.mark.parametrize("kind", ["CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"])
def test_no_model_of_transformers_that_writes_is_unknown(kind: str) -> None:
    """Each has a family, or is refused with a reason."""
    from transformers.models.auto import modeling_auto

    known = {*families(), *VISION_MODELS, *REFUSED_MODELS}
    assert set(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()) - known == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_and_frozen(family: str, tmp_path: Path) -> None:
    model = open_cpu(build_checkpoint(family, tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    # The last experts of LongCat compute nothing.
    derived = r"inv_freq$|act_fn\.eps$|slope_rate$|\w+_decay$|eh_proj\.weight$"
    left_out = re.compile(derived + (r"|experts\.[678]\." if family == "longcat_flash" else ""))
    stored = sum(tensor.numel() for name, tensor in tensors.items() if not left_out.search(name))
    assert model.config.num_parameters == stored
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(("family", "dtype"), list(zip(FAMILIES, cycle([torch.bfloat16, torch.float16]))))
def test_half_precision_follows_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Close where the logits are decided: rounding moves them, but not by a fifth of their spread."""
    build_checkpoint(family, tmp_path, dtype=dtype)
    results = []
    for each in (torch.float32, dtype):
        runner = Runner(open_cpu(tmp_path, each), block_size=16, dtype=each)
        row = runner.row(random_tokens(1, 24), prompt_len=20)
        runner.step((row, 20))
        runner.decode(row, 24)
        results.append(row.result)
    error = (results[0] - results[1].float()).std() / results[0].std()
    assert error < 0.2, error


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def logits_of(model: DecoderLM) -> Tensor:
    runner = Runner(model, block_size=16)
    row = runner.row(random_tokens(1, 24), prompt_len=24)
    runner.step((row, 24))
    return row.result


def hub_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([random_tokens(1, 24)])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("family", "embedding"), [("qwen3", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_a_tied_model_stored_under_the_name_of_its_head(family: str, embedding: str, tmp_path: Path) -> None:
    """As tools write it that drop the second name of a tensor, whichever that is."""
    table = open_cpu(build_checkpoint(family, tmp_path)).embed.weight
    rewrite(tmp_path, lambda tensors: {"lm_head.weight": tensors.pop(embedding), **tensors})
    model = open_cpu(tmp_path)
    assert model.config.tied
    assert torch.equal(model.embed.weight, table)


def test_a_tied_model_ignores_a_copy_of_its_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_checkpoint("qwen3", tmp_path)
    expected = logits_of(open_cpu(tmp_path))
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    model = open_cpu(tmp_path)
    assert model.config.tied
    assert torch.equal(logits_of(model), expected)
    assert not caplog.records


@pytest.mark.parametrize("difference", ["everything", "the last number"])
def test_a_tied_model_with_a_head_of_its_own_uses_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, difference: str
) -> None:
    build_checkpoint("qwen3", tmp_path)

    def add_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        if difference == "everything":
            head = head.roll(1, 0)
        else:
            head[-1, -1] += 1
        return {**tensors, "lm_head.weight": head}

    rewrite(tmp_path, add_head)
    model = open_cpu(tmp_path)
    assert not model.config.tied
    assert (logits_of(model) - hub_logits(tmp_path)).abs().max() < 1e-4
    (record,) = (each for each in caplog.records if each.name == "asyncllm")
    assert record.levelname == "WARNING"
    assert "lm_head.weight differs" in record.getMessage()


@pytest.mark.parametrize(("first", "second"), [(torch.float32, torch.float16), (torch.float32, torch.int32)])
def test_a_tied_model_with_a_head_of_another_type(tmp_path: Path, first: torch.dtype, second: torch.dtype) -> None:
    build_checkpoint("qwen3", tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].to(first).to(second)},
    )
    if second == torch.int32:
        with pytest.raises(UnsupportedModel, match="I32"):
            open_cpu(tmp_path)
    else:
        assert not open_cpu(tmp_path).config.tied


@pytest.mark.parametrize("shape", [[], [320], [320, 1], [0, 64], [1, 320, 64]])
def test_a_tied_model_with_a_head_of_another_shape(tmp_path: Path, shape: list[int]) -> None:
    build_checkpoint("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(shape)})
    with pytest.raises(InvalidCheckpoint, match=r"lm_head\.weight.*has shape"):
        open_cpu(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "layers.0.self_attn.rotary_emb.sin_cached",
        "model.layers.1.attention.rotary_emb.cos_cache",
        "model.rotary_pos_emb.inv_freq",
        "model.layers.0.self_attn.inv_freq",
    ],
)
def test_stored_rotary_buffers_are_ignored(tmp_path: Path, name: str) -> None:
    build_checkpoint("llama", tmp_path)
    expected = logits_of(open_cpu(tmp_path))
    rewrite(tmp_path, lambda tensors: {**tensors, name: torch.zeros(8)})
    model = open_cpu(tmp_path)
    assert torch.equal(logits_of(model), expected)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb", "model.rotary_weight", "inv_freq_scale"])
def test_other_tensors_are_not(tmp_path: Path, name: str) -> None:
    build_checkpoint("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, name: torch.zeros(8)})
    with pytest.raises(InvalidCheckpoint, match="matches no row"):
        open_cpu(tmp_path)


def test_a_shard_may_hold_what_the_index_omits(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    expected = logits_of(open_cpu(tmp_path))
    file = tmp_path / "model.safetensors"
    names = [name for name in load_file(file) if name != "model.norm.weight"]
    file.rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert torch.equal(logits_of(open_cpu(tmp_path)), expected)


@pytest.mark.parametrize(("family", "prefix"), [("llama", "model."), ("internlm2", "model."), ("qwen", "transformer.")])
def test_names_without_the_prefix_of_the_base_model(tmp_path: Path, family: str, prefix: str) -> None:
    """Saved without a head, and with the head beside them."""
    build_checkpoint(family, tmp_path)
    expected = logits_of(open_cpu(tmp_path))
    rewrite(tmp_path, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    model = open_cpu(tmp_path)
    assert model.config.has_head
    assert torch.equal(logits_of(model), expected)
    head = "output.weight" if family == "internlm2" else "lm_head.weight"
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != head})
    assert not open_cpu(tmp_path).config.has_head


def test_a_name_with_and_without_the_prefix_is_refused(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"].clone()})
    with pytest.raises(InvalidCheckpoint, match="both fill norm"):
        open_cpu(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "tied", "prefixed", "stored", "has_head"),
    [
        ("Qwen3Model", False, False, False, False),
        ("Qwen3Model", False, True, False, False),
        ("Qwen3Model", True, False, False, False),
        ("Qwen3Model", False, True, True, True),
        ("Qwen3ForCausalLM", False, False, False, False),
        ("Qwen3ForCausalLM", True, False, False, True),
        ("Qwen3ForCausalLM", False, True, False, None),
    ],
)
def test_whether_there_is_a_head(
    tmp_path: Path, architecture: str, tied: bool, prefixed: bool, stored: bool, has_head: bool | None
) -> None:
    """By the file first, then by the class; a head that is lost from a file of a whole model is missed."""
    build_checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    edit(tmp_path, architectures=[architecture], tie_word_embeddings=tied)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if stored or name != "lm_head.weight"}
        return kept if prefixed else {name.removeprefix("model."): tensor for name, tensor in kept.items()}

    rewrite(tmp_path, change)
    if has_head is None:
        with pytest.raises(InvalidCheckpoint, match=r"no tensor fills .* head\.weight"):
            open_cpu(tmp_path)
    else:
        assert open_cpu(tmp_path).config.has_head == has_head


def test_every_family_is_found_by_its_model_type(tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = build_checkpoint(family, tmp_path / family)
        named = read_config(folder)
        edit(folder, architectures=None)
        assert read_config(folder) == named


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    edit(tmp_path, architectures=None, model_type="rwkv")
    with pytest.raises(UnsupportedModel, match=r"\['rwkv'\] is not implemented"):
        open_cpu(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stated", ["auto", None])
def test_an_unstated_type_is_that_of_the_weights(tmp_path: Path, dtype: torch.dtype, stated: str | None) -> None:
    build_checkpoint("llama", tmp_path, dtype=dtype)
    edit(tmp_path, dtype=stated)
    assert read_config(tmp_path).dtype == str(dtype).removeprefix("torch.")


def test_weights_of_64_bits(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    expected = logits_of(open_cpu(tmp_path))
    rewrite(tmp_path, lambda tensors: {name: tensor.double() for name, tensor in tensors.items()})
    edit(tmp_path, dtype="float64")
    assert torch.equal(logits_of(open_cpu(tmp_path)), expected)


def test_missing_bias_is_named(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path, attention_bias=False)
    edit(tmp_path, attention_bias=True)
    with pytest.raises(InvalidCheckpoint, match=r"layers\.0\.attn\.qkv\.bias\[q\]"):
        open_cpu(tmp_path)


def test_surplus_bias_is_named(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    edit(tmp_path, attention_bias=False)
    with pytest.raises(InvalidCheckpoint, match=r"self_attn\.[a-z]_proj\.bias"):
        open_cpu(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**24, "hidden_size": 2**24, "num_attention_heads": 4},
        {"intermediate_size": 2**24},
        {"num_hidden_layers": 1000},
        {"head_dim": 2**14},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sizes_beyond_the_checkpoint_are_refused_before_memory_is_asked_for(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    build_checkpoint("llama", tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(InvalidCheckpoint, match="the safetensors files hold 103,"):
        open_cpu(tmp_path)


def test_weights_must_be_there(tmp_path: Path) -> None:
    build_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises((InvalidCheckpoint, ModelNotFound)):
        open_cpu(tmp_path)


def test_a_layer_that_guesses_further_tokens_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek-V3's files have one behind the others, with an embedding and a head of its own."""
    expected = logits_of(open_cpu(build_checkpoint("deepseek_v3", tmp_path)))

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        extra = {name.replace(".1.", ".2.", 1): tensor + 1 for name, tensor in last.items()}
        extra |= {f"model.layers.2.{name}": torch.ones(3) for name in ("enorm.weight", "shared_head.head.weight")}
        return {**tensors, **extra}

    rewrite(tmp_path, add)
    with caplog.at_level("INFO", "asyncllm"):
        assert torch.equal(logits_of(open_cpu(tmp_path)), expected)
    assert "tensors of model.layers.2 are not needed and left out" in caplog.text
    edit(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(InvalidCheckpoint, match=r"model\.layers\.2"):
        open_cpu(tmp_path)
