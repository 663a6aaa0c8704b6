"""Typed reading of config.json, refusing what is not implemented.

`HFConfig` wraps the file. A family's `configure` reads the entries that the family knows and returns a `ModelConfig`.
Both schemas of the file are supported: the legacy one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `dtype`, `layer_types`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.layers.linear_method import Activation
from asyncllm.models.model_config import ExpertsConfig, ModelConfig
from asyncllm.models.overrides import with_rotation
from asyncllm.models.rope import read_rope
from asyncllm.models.typed_fields import MAX_POSITION, MISSING, TypedFields
from asyncllm.text.config_overrides import overridden

__all__ = ["ExpertsConfig", "HFConfig", "ModelConfig", "alibi_slopes"]

DTYPES: Mapping[str, str] = {
    **{name: name for name in ("float32", "bfloat16", "float16")},
    "float": "float32",
    "half": "float16",
    # 64-bit numbers are rounded when they are read.
    "float64": "float32",
    "double": "float32",
    "auto": "",
}
"""Names of dtypes in config.json, without "torch." in front -> the dtypes they are read as."""

MAX_LAYERS = 1024
MAX_EXPERTS = 4096

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in config.json."""


class HFConfig(TypedFields):
    """config.json with typed reads. `null` counts as absent.

    `session_len` and `rope_scaling_factor` are the engine's settings, which affect the rotary embedding.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        source: str = "config.json",
        session_len: int | None = None,
        rope_scaling_factor: float = 0.0,
    ) -> None:
        super().__init__(fields, source=source)
        self.session_len = session_len
        self.rope_scaling_factor = rope_scaling_factor

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        overrides: Mapping[str, Any] | None = None,
        session_len: int | None = None,
        rope_scaling_factor: float = 0.0,
    ) -> HFConfig:
        """Read `folder`/config.json, with entries replaced by `overrides`. Raises InvalidCheckpoint, and
        InvalidParameter for an override without effect."""
        file = folder / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidCheckpoint(
                f"{file}: cannot be read ({error.strerror}). A model folder needs config.json beside its weights."
            ) from None
        except (ValueError, RecursionError) as error:
            raise InvalidCheckpoint(f"{file}: not valid JSON ({error}). Download the file again.") from None
        if not isinstance(fields, dict):
            raise InvalidCheckpoint(f"{file}: holds {_kind(fields)} where an object belongs. Download the file again.")
        return cls(
            overridden(fields, overrides or {}, change=with_rotation),
            source=str(file),
            session_len=session_len,
            rope_scaling_factor=rope_scaling_factor,
        )

    def changed(self, fields: Mapping[str, Any], **settings: Any) -> HFConfig:
        """Return the file with other entries, and other values of the engine's settings."""
        return self.replaced({**self.fields, **fields}, **settings)

    def replaced(self, fields: Mapping[str, Any], **settings: Any) -> HFConfig:
        """Return a file of these entries alone, and of the same settings unless others are given."""
        kept = {"source": self.source, "session_len": self.session_len, "rope_scaling_factor": self.rope_scaling_factor}
        return HFConfig(fields, **{**kept, **settings})

    def completed(self, usual: Mapping[str, Any]) -> HFConfig:
        """Return the file with the entries in `usual` where it has none, or null."""
        return self.changed({key: value for key, value in usual.items() if self.fields.get(key) is None})

    def named(self, words: Mapping[str, str]) -> HFConfig:
        """Return the file with the entries in `words`, old name -> usual name, available under the usual names too."""
        return self.changed({new: self.fields[old] for old, new in words.items() if self.fields.get(old) is not None})

    def with_llama3_rope(self, factor: float) -> HFConfig:
        """Return this config; if it defines no rotation, with Llama 3's for contexts of `factor` times 8192 tokens."""
        if self.fields.get("rope_parameters") is not None or "rope_scaling" in self.fields:
            return self
        usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return self.changed({"rope_scaling": {"rope_type": "llama3", "factor": factor, **usual}})

    def of_layers(self, kind: str) -> HFConfig:
        """Return the file as read by layers of this kind, such as "full_attention": with their own rope_parameters, if
        these are given by kind of layer. Raises UnsupportedModel if they are given for all layers at once."""
        nested = self.fields.get("rope_parameters")
        if not isinstance(nested, dict) or not isinstance(nested.get(kind), dict):
            if isinstance(nested, dict) and not any(isinstance(each, dict) for each in nested.values()) and nested:
                self.unsupported("rope_parameters", "Name the kinds of layers that each rotation is for.")
            return self
        return self.changed({"rope_parameters": nested[kind]})

    def activation(self, key: str, default: str) -> Activation:
        """Return the activation of an MLP. Raises UnsupportedModel if it is not implemented."""
        self.expect(key, *ACTIVATIONS)
        return ACTIVATIONS[self.read(key, default)]

    def decoder(
        self,
        architecture: str,
        *,
        max_position: int = 2048,
        theta: float = 10000.0,
        head_dim: int | None = None,
        norm_eps: float = 1e-6,
        tied: bool = False,
        partial_rotary: float | None = None,
        rope_dim: int | None = None,
        rotary: bool = True,
        intermediate_size: int | None = None,
    ) -> dict[str, Any]:
        """Return the ModelConfig fields that all families read alike; the arguments are defaults for absent keys.
        `partial_rotary`: default of partial_rotary_factor, the fraction of each head that is rotated, if that entry is
        allowed. `rope_dim`: number of rotated features per head, if other entries describe the rest of a head.
        `rotary`: whether any are rotated.

        Raises InvalidCheckpoint for wrong types and impossible sizes, UnsupportedModel for what is not implemented.
        """
        self.expect("use_logn_attn", False)
        self.expect("is_causal", True)
        hidden_size = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads", maximum=2**16)
        num_kv_heads = self.integer("num_key_value_heads", num_heads, maximum=2**16)
        if num_heads % num_kv_heads:
            self.invalid("num_key_value_heads", f"which does not divide num_attention_heads = {num_heads}")
        head_dim = rope_dim or self.optional_integer("head_dim", head_dim)
        if head_dim is None:
            if hidden_size % num_heads:
                self.invalid("num_attention_heads", f"which does not divide hidden_size = {hidden_size}")
            head_dim = hidden_size // num_heads
        if head_dim % 2 or head_dim > 2**14:
            self.invalid("head_dim", f"giving heads of {head_dim}, where rotary embedding needs an even size")
        num_layers = self.integer("num_hidden_layers", maximum=MAX_LAYERS)
        trained = self._whole_chunk(self.integer("max_position_embeddings", max_position, maximum=MAX_POSITION))
        rope = None
        if rotary:
            rope, trained = read_rope(
                self,
                head_dim,
                trained,
                theta,
                partial_rotary,
                session_len=self.session_len,
                scaling_factor=self.rope_scaling_factor,
            )
        elif self.rope_scaling_factor > 0:
            raise UnsupportedModel(
                f"rope_scaling_factor = {self.rope_scaling_factor} asks for dynamic NTK scaling, and the model of "
                f"{self.source} has no rotary positions. Set rope_scaling_factor=0."
            )
        return {
            "architecture": architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size", intermediate_size or MISSING),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position": trained,
            "beyond": self._beyond_chunks(),
            "dtype": self._dtype(),
            "norm_eps": self.number("rms_norm_eps", norm_eps, positive=False),
            "tied": self.flag("tie_word_embeddings", tied),
            "rope": rope,
            "windows": (None,) * num_layers,
        }

    def windows(self, num_layers: int, window: int | None, sliding: list[bool] | None = None) -> tuple[int | None, ...]:
        """Return each layer's window: `window` for sliding layers, None for others. `sliding` is the family's rule,
        which a `layer_types` list overrides; by default all layers slide."""
        if self.fields.get("layer_types") is not None:
            kinds = self.layer_kinds(num_layers, ("full_attention", "sliding_attention"), [])
            sliding = [kind == "sliding_attention" for kind in kinds]
            if window is None and any(sliding):
                self.invalid("layer_types", "which names sliding layers, but sliding_window is not set")
        if sliding is None:
            return (window,) * num_layers
        return tuple(window if slides else None for slides in sliding)

    def layer_kinds(self, num_layers: int, allowed: tuple[str, ...], default: list[str]) -> list[str]:
        """Return the kind of each layer: `layer_types` or `default`. Raises InvalidCheckpoint for a list of the wrong
        length, UnsupportedModel for a kind that is not allowed."""
        kinds = self.read("layer_types", default)
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.invalid("layer_types", f"where a list of {num_layers} layer kinds belongs")
        if any(kind not in allowed for kind in kinds):
            self.unsupported("layer_types", f"Supported: {', '.join(map(repr, allowed))}.")
        return kinds

    def _dtype(self) -> str:
        key = "dtype" if self.fields.get("dtype") is not None else "torch_dtype"
        value = self.read(key, "auto")
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        if name not in DTYPES:
            self.unsupported(key, f"Supported: {', '.join(DTYPES)}.")
        return DTYPES[name]

    def _beyond_chunks(self) -> str:
        chunked = self.fields.get("dual_chunk_attention_config") is not None
        return "queries attend to chunks of tokens (dual_chunk_attention_config)" if chunked else ""

    def _whole_chunk(self, trained: int) -> int:
        """Return how many of `trained` positions chunked attention (Qwen's models for a million tokens) leaves
        unchanged: beyond the first chunk it changes distances, which is not implemented."""
        entries = self.fields.get("dual_chunk_attention_config")
        if entries is None:
            return trained
        if not isinstance(entries, dict):
            self.invalid("dual_chunk_attention_config", "where an object belongs")
        chunks = TypedFields(entries, source=f"{self.source}: dual_chunk_attention_config")
        return min(trained, chunks.integer("chunk_size", trained, maximum=MAX_POSITION))


def alibi_slopes(num_heads: int, *, max_bias: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """Return the ALiBi slopes of Press et al.: 2^(-max_bias i / n) for i = 1 to n heads, if n is a power of two.
    Otherwise the slopes of the next lower power, followed by every other one of the next higher power. `scale`
    multiplies them."""
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-max_bias * (index + 1) / lower) for index in range(lower)]
    between = [2.0 ** (-max_bias * (2 * index + 1) / (2 * lower)) for index in range(num_heads - lower)]
    return tuple(scale * slope for slope in slopes + between)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", int: "a number", float: "a number"}.get(type(value), repr(value))
