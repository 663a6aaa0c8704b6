"""Checkpoints of random weights: any shape in the hub's layout, for timing a model that is not at hand.

    python bench/shapes.py llama-3-8b FOLDER
    python bench/shapes.py qwen2.5-vl-7b FOLDER
    python bench/shapes.py my-config.json FOLDER --seed 1
    python bench/shapes.py llama-3-8b FOLDER --format int8

Writes config.json, shards of bfloat16 with their index, and a byte-level tokenizer that fills the vocabulary. Matrices
are normal with deviation 0.02, norms are ones; the same seed gives the same files on the same kind of device. With a
format the projections are of 8 bits, with a scale for each output feature, as LMDeploy's `smooth_quant` has them, or
random codes of AWQ, in groups of 128 with one scale and zero point. gpt-oss has experts in MXFP4, as it is published.
Random numbers come from a GPU if there is one, and several threads write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from dense_shapes import DENSE_SHAPES, dense_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from vision_shapes import VISION_SHAPES, companions, tower_tensors, with_token_ids

__all__ = ["SHAPES", "write_checkpoint", "write_tokenizer"]

DEVIATION = 0.02
MAX_SHARD_BYTES = 4 * 2**30
CHUNK_BYTES = 32 * 2**20
"""Random numbers are drawn, copied and written in pieces of this size."""
WRITE_THREADS = 8

FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Types of 8 bits, and their largest numbers, which stand for five deviations."""

AWQ_GROUP = 128
AWQ_SCALE = DEVIATION / 4.6
"""Codes from 0 to 15 deviate by 4.6."""
EIGHTS = -0x77777778
"""The int32 whose every four bits are 8."""
MXFP4_SCALE = 120
"""2^-7: numbers of e2m1 deviate by 2.9."""

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""Of types in safetensors files."""

_SPECIAL = ("<unk>", "<s>", "</s>")

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    **DENSE_SHAPES,
    **VISION_SHAPES,
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    # Every eighth of the experts, and a quarter of the layers.
    "qwen3-next-cut": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 12},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"num_experts": 64, "num_experts_per_tok": 10, "norm_topk_prob": True},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        **{"max_position_embeddings": 262144, "rope_theta": 10000000.0, "tie_word_embeddings": False},
    },
    "tiny": {
        **_LLAMA,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class Weight:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    fill: float | None = None
    """The number that all of it is, such as a norm's 1; None: random numbers, or bits in int32 and uint8."""
    dtype: torch.dtype = torch.bfloat16
    scale: float = 1.0
    """What a number is divided by where it is stored."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def chunk(self) -> int:
        """How many numbers are drawn at once."""
        return CHUNK_BYTES // max(2, self.dtype.itemsize)

    def stored(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return random bfloat16 numbers or bits, or `fill`, as the file has them."""
        if self.dtype in (torch.bfloat16, torch.int32, torch.uint8):
            return drawn
        if self.dtype == torch.float32:
            return drawn.float().fill_(self.fill or 0.0)
        divided = drawn.float() / self.scale
        return (divided.round().clamp(-127, 127) if self.dtype == torch.int8 else divided).to(self.dtype)


def weights(config: dict[str, Any]) -> Iterator[Weight]:
    """Every tensor that a checkpoint of `config` holds.

    Raises ValueError for an architecture whose names are not known here.
    """
    if "vision_config" in config:
        for weight in weights(config["text_config"]):
            yield replace(weight, name=f"language_model.{weight.name}")
        for name, shape, ones in tower_tensors(config):
            yield Weight(name, shape, ones)
        return
    dense = dense_tensors(config)
    if dense is not None:
        for name, shape, fill in dense:
            yield Weight(name, shape, fill)
        return
    architecture = config["architectures"][0]
    known = (
        "DeepseekV2ForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    )
    if architecture not in known:
        raise ValueError(f"{architecture}: the shapes that can be written are those of {', '.join(known)}")
    biased = architecture == "GptOssForCausalLM"
    if config.get("attention_bias", biased) is not biased or config.get("mlp_bias"):
        raise ValueError("shapes with biases cannot be written")
    is_next = architecture == "Qwen3NextForCausalLM"
    # Its norms store what their factors are above 1.
    plain = 0.0 if is_next else 1.0
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    yield Weight("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        delta = is_next and (layer + 1) % config["full_attention_interval"] > 0
        yield Weight(f"{prefix}.input_layernorm.weight", (hidden,), fill=plain)
        if architecture == "DeepseekV2ForCausalLM":
            yield from _latent_attention(f"{prefix}.self_attn", config)
        elif delta:
            yield from _delta_net(f"{prefix}.linear_attn", config)
        else:
            yield Weight(f"{prefix}.self_attn.q_proj.weight", ((1 + is_next) * queries, hidden))
            yield Weight(f"{prefix}.self_attn.k_proj.weight", (keys, hidden))
            yield Weight(f"{prefix}.self_attn.v_proj.weight", (keys, hidden))
            yield Weight(f"{prefix}.self_attn.o_proj.weight", (hidden, queries))
            if architecture.startswith("Qwen2"):
                for name, size in (("q", queries), ("k", keys), ("v", keys)):
                    yield Weight(f"{prefix}.self_attn.{name}_proj.bias", (size,))
        if biased:
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
                yield Weight(f"{prefix}.self_attn.{name}_proj.bias", (size,))
            yield Weight(f"{prefix}.self_attn.sinks", (heads,))
        if architecture.startswith("Qwen3") and not delta:
            yield Weight(f"{prefix}.self_attn.q_norm.weight", (head_dim,), fill=plain)
            yield Weight(f"{prefix}.self_attn.k_norm.weight", (head_dim,), fill=plain)
        yield Weight(f"{prefix}.post_attention_layernorm.weight", (hidden,), fill=plain)
        if architecture in ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"):
            if is_next:
                yield from _mlp(f"{prefix}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
                yield Weight(f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden))
            yield Weight(f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden))
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        elif architecture == "DeepseekV2ForCausalLM" and layer >= config["first_k_dense_replace"]:
            size = config["moe_intermediate_size"]
            yield Weight(f"{prefix}.mlp.gate.weight", (config["n_routed_experts"], hidden))
            yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, config["n_shared_experts"] * size)
            for expert in range(config["n_routed_experts"]):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, size)
        elif architecture == "GptOssForCausalLM":
            yield from _mxfp4_experts(f"{prefix}.mlp", config)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield Weight("model.norm.weight", (hidden,), fill=plain)
    if not config.get("tie_word_embeddings"):
        yield Weight("lm_head.weight", (config["vocab_size"], hidden))


def in_format(each: Weight, name: str) -> tuple[Weight, ...]:
    """Return what a checkpoint in 8 or 4 bits has of a tensor: codes and scales of a projection, else the tensor.

    Raises ValueError for sizes that AWQ does not have.
    """
    if not (each.name.startswith("model.layers.") and each.name.endswith("_proj.weight")):
        return (each,)
    if name == "awq":
        return _in_awq(each.name.removesuffix(".weight"), *each.shape)
    dtype, largest = FORMATS[name]
    scale = 5 * DEVIATION / largest
    codes = replace(each, dtype=dtype, scale=scale)
    scales = each.name.removesuffix("weight") + "scale"
    return codes, Weight(scales, (each.shape[0], 1), fill=scale, dtype=torch.float32)


def _latent_attention(prefix: str, config: dict[str, Any]) -> Iterator[Weight]:
    """Of a model whose queries have no bottleneck."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield Weight(f"{prefix}.q_proj.weight", (heads * (nope + rope), hidden))
    yield Weight(f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden))
    yield Weight(f"{prefix}.kv_a_layernorm.weight", (rank,), fill=1.0)
    yield Weight(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), rank))
    yield Weight(f"{prefix}.o_proj.weight", (hidden, heads * value))


def _in_awq(module: str, rows: int, columns: int) -> tuple[Weight, ...]:
    """As AWQ's `gemm` files have it."""
    if rows % 8 or columns % AWQ_GROUP:
        raise ValueError(f"{module} is {rows} x {columns}, and AWQ needs multiples of 8 x {AWQ_GROUP}")
    groups = columns // AWQ_GROUP
    return (
        Weight(f"{module}.qweight", (columns, rows // 8), dtype=torch.int32),
        Weight(f"{module}.qzeros", (groups, rows // 8), EIGHTS, torch.int32),
        Weight(f"{module}.scales", (groups, rows), AWQ_SCALE, torch.float16),
    )


def _mxfp4_experts(prefix: str, config: dict[str, Any]) -> Iterator[Weight]:
    hidden, count, size = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    yield Weight(f"{prefix}.router.weight", (count, hidden))
    yield Weight(f"{prefix}.router.bias", (count,))
    for name, rows, columns in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
        tensor = f"{prefix}.experts.{name}_proj"
        yield Weight(f"{tensor}_blocks", (count, rows, columns // 32, 16), dtype=torch.uint8)
        yield Weight(f"{tensor}_scales", (count, rows, columns // 32), MXFP4_SCALE, torch.uint8)
        yield Weight(f"{tensor}_bias", (count, rows))


def _delta_net(prefix: str, config: dict[str, Any]) -> Iterator[Weight]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    yield Weight(f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden))
    yield Weight(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden))
    yield Weight(f"{prefix}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"]))
    yield Weight(f"{prefix}.A_log", (heads,))
    yield Weight(f"{prefix}.dt_bias", (heads,))
    yield Weight(f"{prefix}.norm.weight", (config["linear_value_head_dim"],), fill=1.0)
    yield Weight(f"{prefix}.out_proj.weight", (hidden, values))


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Weight]:
    yield Weight(f"{prefix}.gate_proj.weight", (intermediate, hidden))
    yield Weight(f"{prefix}.up_proj.weight", (intermediate, hidden))
    yield Weight(f"{prefix}.down_proj.weight", (hidden, intermediate))


def write_checkpoint(
    config: dict[str, Any],
    folder: Path,
    *,
    seed: int = 0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    number_format: str | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Write a complete model folder. `config` are the fields of config.json, special token ids apart.

    `number_format` is one of `FORMATS`, or "awq". `progress` is told of every piece how many bytes it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    tokens: Sequence[str] = ()
    if "vision_config" in config:
        config = with_token_ids(config)
        tokens, pictures = companions(config)
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures, indent=2), encoding="utf-8")
    if number_format == "awq":
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "zero_point": True}
    elif number_format is not None:
        config["quantization_config"] = {"quant_method": "smooth_quant", "quant_dtype": number_format}
    shards: list[list[Weight]] = [[]]
    room = max_shard_bytes
    for weight in tensors(config, number_format):
        if shards[-1] and weight.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    total = sum(weight.num_bytes for shard in shards for weight in shard)
    with Writer(seed) as writer:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, shard, writer, progress)
    where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(folder, config.get("text_config", config)["vocab_size"], tokens)


def tensors(config: dict[str, Any], number_format: str | None) -> Iterator[Weight]:
    """Every tensor that a checkpoint of `config` holds in that format."""
    for each in weights(config):
        yield from (each,) if number_format is None else in_format(each, number_format)


def _write_shard(file: Path, shard: list[Weight], writer: Writer, progress: Callable[[int], object]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in shard:
        end = position + weight.num_bytes
        header[weight.name] = {"dtype": _NAMES[weight.dtype], "shape": weight.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, struct.pack("<Q", len(text)) + text)
        position = 8 + len(text)
        for weight in shard:
            for start in range(0, math.prod(weight.shape), weight.chunk):
                count = min(weight.chunk, math.prod(weight.shape) - start)
                writer.write(descriptor, position + start * weight.dtype.itemsize, count, weight)
                progress(count * weight.dtype.itemsize)
            position += weight.num_bytes
        writer.finish()
    finally:
        os.close(descriptor)


class Writer:
    """Draws numbers on the device and writes them by several threads."""

    def __init__(self, seed: int) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._drawn = torch.empty(CHUNK_BYTES // 2, dtype=torch.bfloat16, device=self._device)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(2 * WRITE_THREADS):
            pinned = self._device.type == "cuda"
            self._free.put(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned))
        self._pool = ThreadPoolExecutor(WRITE_THREADS)
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def write(self, descriptor: int, position: int, count: int, weight: Weight) -> None:
        """Enqueue `count` numbers of a weight for `position` of the file."""
        drawn = self._drawn[:count]
        if weight.dtype in (torch.int32, torch.uint8):
            drawn = self._drawn[: count * weight.dtype.itemsize // 2].view(torch.int16)
            if weight.fill is None:
                drawn.random_(-(2**15), 2**15, generator=self._generator)
            else:
                drawn.view(weight.dtype).fill_(weight.fill)
        elif weight.fill is None:
            drawn.normal_(0, DEVIATION, generator=self._generator)
        else:
            drawn.fill_(weight.fill)
        data = weight.stored(drawn).view(torch.uint8)
        buffer = self._free.get()
        buffer[: len(data)].copy_(data)
        self._writes.append(self._pool.submit(self._write, descriptor, position, buffer, len(data)))

    def _write(self, descriptor: int, position: int, buffer: torch.Tensor, count: int) -> None:
        try:
            data = buffer[:count].numpy().data
            while data:
                written = os.pwrite(descriptor, data, position)
                position, data = position + written, data[written:]
        finally:
            self._free.put(buffer)

    def finish(self) -> None:
        """Wait until everything is written. Raises what a write raised."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()


def write_tokenizer(folder: Path, vocab_size: int, more: Sequence[str] = ()) -> None:
    """Write a byte-level tokenizer in which every id below `vocab_size` stands for text.

    After three special tokens and the 256 bytes come pairs and then longer runs of printable characters, each merged
    from the run before it: encoding and opening it cost what they cost with a trained vocabulary of that size. Its last
    ids are the special tokens `more`. Raises ValueError for a vocabulary below 259 and these.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id_ for id_, token in enumerate((*_SPECIAL, *alphabet))}
    plain = vocab_size - len(more)
    if plain < len(vocab):
        raise ValueError(f"vocab_size is {vocab_size}, and the bytes alone take {len(vocab)} ids")
    letters = [character for character in alphabet if character.isascii() or character == "Ġ"]
    merges: list[tuple[str, str]] = []
    runs = (run for length in itertools.count(2) for run in itertools.product(letters, repeat=length))
    while len(vocab) < plain:
        *first, last = next(runs)
        merges.append(("".join(first), last))
        vocab["".join(first) + last] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=_SPECIAL[0]))
    tokenizer.add_special_tokens([*_SPECIAL, *more])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True)),
        "added_tokens_decoder": {str(plain + index): {"content": token} for index, token in enumerate(more)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or the path of a config.json")
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[*FORMATS, "awq"], help="of the projections, instead of bfloat16")
    arguments = parser.parse_args()
    if arguments.shape in SHAPES:
        config = SHAPES[arguments.shape]
    else:
        try:
            config = json.loads(Path(arguments.shape).read_text(encoding="utf-8"))
        except OSError:
            sys.exit(f"{arguments.shape} is neither a shape ({', '.join(SHAPES)}) nor the path of a config.json")
    total = sum(weight.num_bytes for weight in tensors(config, arguments.format))
    with tqdm(total=total, unit="B", unit_scale=True, desc=arguments.folder.name) as progress:
        write_checkpoint(
            config, arguments.folder, seed=arguments.seed, number_format=arguments.format, progress=progress.update
        )


if __name__ == "__main__":
    main()
