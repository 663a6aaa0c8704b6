"""Tiny checkpoints in the layout of the hub: random weights, every parameter perturbed, a small trained tokenizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from asyncllm.models.registry import families
from tests.remote_layouts import LAYOUTS, Layout

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "UNMAPPED",
    "build_checkpoint",
    "build_oracle",
    "native_class",
    "perturb",
    "tiny_fields",
    "write_tokenizer",
]

_TOKENS = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}

UNMAPPED = {"mistral4": "Mistral4ForCausalLM", "step3p7": "Step3p7ForConditionalGeneration"}
"""Types of models whose class transformers has, and does not find by itself."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 3."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is 17 + 25? The answer is 42. Tell me a story about the sea.",
    "Once upon a time there was a small engine that served every request in the order in which it came.",
    "How are you today? I am well, thank you. 你好，世界。 Grüße aus Köln. 🙂",
)


def build_checkpoint(
    family: str,
    folder: Path,
    *,
    legacy: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a complete model folder and return it.

    `family` is a module of asyncllm.models ("llama", "qwen2", ...) or one of LAYOUTS, whose `tiny` entries `overrides`
    replace in config.json. `legacy` writes the schema of before transformers 5 (rope_theta, rope_scaling, torch_dtype).
    The tokenizer knows the 256 bytes, SPECIAL_TOKENS and a few merges; vocab_size must be at least 260.
    """
    fields = {**tiny_fields(family), **overrides}
    layout = LAYOUTS.get(family)
    _save_native(fields if layout is None else layout.native_fields(fields), folder, seed, dtype, layout)
    if layout is not None:
        _rewrite(folder, fields, layout)
    if legacy:
        _rewrite_as_legacy(folder / "config.json")
    _write_json(folder / "generation_config.json", {**_TOKENS, "eos_token_id": [3]})
    write_tokenizer(folder, fields.get("vocab_size") or fields["padded_vocab_size"])
    return folder


def build_oracle(family: str, folder: Path, **overrides: Any) -> Path:
    """Write the native checkpoint that computes what `build_checkpoint` of the same arguments does, and return it."""
    layout = LAYOUTS[family]
    _save_native(layout.native_fields({**tiny_fields(family), **overrides}), folder, 0, torch.float32, layout)
    file = folder / "model.safetensors"
    save_file(layout.oracle(load_file(file)), file, metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, vocab_size: int, *, more: Sequence[str] = (), template: str | None = None) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, `more` special ones among them behind the usual, with
    a ChatML template unless another is given."""
    special_tokens = [*SPECIAL_TOKENS, *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(index): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for index, token in enumerate(special_tokens)
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "chat_template": template or CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def tiny_fields(family: str) -> dict[str, Any]:
    """Entries of a small config.json of `family`."""
    layout = LAYOUTS.get(family)
    module = family if layout is None else layout.family
    for each in families().values():
        if each.__module__ == f"asyncllm.models.{module}":
            fields = dict(each.tiny)
            if layout is not None:
                fields = {key: value for key, value in fields.items() if key not in layout.dropped}
                fields |= {**layout.extra, "model_type": layout.model_type}
            return fields
    raise ValueError(f"no family in asyncllm.models.{module}")


def native_class(model_type: str) -> Any:
    """Return transformers' class, which opens causal language models of a type."""
    import transformers

    return getattr(transformers, UNMAPPED.get(model_type, "AutoModelForCausalLM"))


def _save_native(fields: Mapping[str, Any], folder: Path, seed: int, dtype: torch.dtype, layout: Layout | None) -> None:
    """A model that transformers knows, with every parameter perturbed."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its monitor thread outlives the test
    source = {**fields, **_TOKENS}
    model_type = source.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {__version__} has no {model_type}")
    config = AutoConfig.for_model(model_type, **source)
    model_class = native_class(model_type)
    create = model_class._from_config if model_type in UNMAPPED else model_class.from_config
    model = create(config, dtype=torch.float32)
    if layout is not None and layout.patch is not None:
        layout.patch(model)
    perturb(model, seed, offset=0.0 if _stores_less(model_type) else 1.0)
    model.to(dtype).save_pretrained(folder)


def _rewrite(folder: Path, fields: Mapping[str, Any], layout: Layout) -> None:
    """A native checkpoint under the names of another layout."""
    file = folder / "model.safetensors"
    renamed = layout.rename(load_file(file), dict(fields))
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, file, metadata={"format": "pt"})
    native = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = (*(() if layout.rope else ("rope_parameters",)), *(() if layout.family == "qwen" else ("dtype",)))
    shared = {key: native[key] for key in kept if key in native}
    named = {**_TOKENS, **shared, "architectures": [layout.architecture]}
    named |= {"auto_map": {"AutoModelForCausalLM": f"modeling_{layout.model_type}.{layout.architecture}"}}
    if layout.family == "qwen":
        named |= {"bf16": native["dtype"] == "bfloat16", "fp16": native["dtype"] == "float16", "no_bias": True}
    if layout.nested:
        fields = {"model_type": layout.model_type, layout.nested: {**fields, **shared}}
        del named["rope_parameters"]
    _write_json(folder / "config.json", {**fields, **named})


def _stores_less(model_type: str) -> bool:
    """Return whether norms store less than their weights, by 1."""
    gemmas = ("gemma", "gemma2", "gemma3_text", "gemma3", "recurrent_gemma", "vaultgemma")
    return model_type in ("nemotron", *gemmas, "step3p7")


def perturb(model: torch.nn.Module, seed: int = 0, *, offset: float = 1.0) -> None:
    """Fill every parameter with numbers of its own; weights of norms lie around `offset`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_perturbed(name, parameter, offset, seed))
            if name.endswith("recurrent_param"):
                # So that states last for some tokens.
                parameter.sub_(4.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "act_fn.beta", "expert_bias")):
                buffer.copy_(_perturbed(name, buffer, offset, seed))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + _perturbed(name, buffer, offset, seed))


def _perturbed(name: str, parameter: Tensor, offset: float, seed: int) -> Tensor:
    """Default initialisation hides bugs: norms of 1 and biases of 0 can be dropped, small matrices barely matter."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))
    is_norm = name.endswith("weight") and parameter.ndim == 1
    return offset + 0.3 * noise if is_norm else 0.15 * noise


_LEGACY_NAMES: dict[str, dict[str, str]] = {
    "bloom": {"hidden_size": "n_embed"},
    "falcon": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "modernbert-decoder": {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"},
}
"""By model_type: what the first files of a family call what transformers writes now."""

_LATER = ("cohere_compass", "gemma4", "laguna", "lfm3", "mimo_v2_flash")
"""What types of models begin with that no earlier transformers wrote."""


def _rewrite_as_legacy(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    rope = None if config["model_type"].startswith(_LATER) else config.pop("rope_parameters", None)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if not rope:
        config = {_LEGACY_NAMES.get(config["model_type"], {}).get(key, key): value for key, value in config.items()}
        _write_json(file, config)
        return
    by_layer = "full_attention" in rope
    if by_layer:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    names = _LEGACY_NAMES.get(config["model_type"], {})
    config[names.get("rope_theta", "rope_theta")] = rope.pop("rope_theta", 10000.0)
    if "partial_rotary_factor" in rope:
        config[names.get("partial_rotary_factor", "partial_rotary_factor")] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = None
    if kind != "default":
        # Llama 3.1's files and those of layers of several kinds say rope_type, most older ones say type.
        config["rope_scaling"] = {"rope_type" if kind == "llama3" or by_layer else "type": kind, **rope}
    config = {names.get(key, key): value for key, value in config.items()}
    if kind == "longrope" and "long_mscale" not in rope:
        config["original_max_position_embeddings"] = config["rope_scaling"].pop("original_max_position_embeddings")
    if "mamba_n_heads" in config and "layer_types" in config:
        named = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [named[kind] for kind in config["layer_types"]]
    elif not by_layer and not {"block_size", "no_rope_layers", "num_dense_layers", "sliding_window_pattern"} & set(
        config
    ):
        config.pop("layer_types", None)
    _write_json(file, config)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")
