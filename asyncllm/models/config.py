"""Typed reading of config.json, refusing what is not implemented.

`HFConfig` wraps the file. A family's `configure` reads the entries that the family knows and returns a `ModelConfig`.
Both schemas of the file are supported: the legacy one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
transformers 5 (`rope_parameters`, `dtype`, `layer_types`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.layers.linear_method import Activation
from asyncllm.layers.rotary import RopeConfig, RopeKind
from asyncllm.models.model_config import ExpertsConfig, ModelConfig
from asyncllm.models.overrides import with_rotation
from asyncllm.text.config_overrides import overridden

__all__ = ["ExpertsConfig", "HFConfig", "ModelConfig", "alibi_slopes", "yarn_term"]

MAX_SIZE = 2**24
"""Above any width, vocabulary or context in use; products of a few such sizes still fit in 64 bits."""
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_POSITION = 2**31 - 1
MAX_NUMBER = 1e30
"""Above any real number in use; integers beyond 1e308 would not even convert."""

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

_MISSING: Any = object()

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

_ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "proportional": "proportional",
    "su": "longrope",
}
"""Names in config.json; "su" is longrope in early Phi-3 files."""

_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "attn_factor",
        "extrapolation_factor",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "partial_rotary_factor",
        "finetuned",
    }
)
"""Entries that are read, plus `finetuned`, a remark in early YaRN files. Any other may change the computation."""

_UNREAD_FACTORS = ("attn_factor", "extrapolation_factor")
"""Multipliers of the YaRN authors' code that transformers ignores; only 1 means the same to both."""


class HFConfig:
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
        self.fields = fields
        self.source = source
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

    def invalid(self, key: str, what: str) -> NoReturn:
        """Raise InvalidCheckpoint for an impossible value."""
        raise InvalidCheckpoint(f"{self.source}: {key} = {_shown(self.fields.get(key))}, {what}. Correct the file.")

    def unsupported(self, key: str, what: str) -> NoReturn:
        """Raise UnsupportedModel for a value that is not implemented."""
        raise UnsupportedModel(f"{self.source}: {key} = {_shown(self.fields.get(key))} is not implemented. {what}")

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.invalid(key, "where an integer belongs")
        if not minimum <= value <= maximum:
            self.invalid(key, f"outside [{minimum}, {maximum}]")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Return a positive integer, or None if the file says null. `default` replaces an absent key."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.integer(key)

    def number(self, key: str, default: Any = _MISSING, *, positive: bool = True) -> float:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            self.invalid(key, "where a finite number belongs")
        if value < 0 or (positive and value == 0):
            self.invalid(key, f"which must be {'above' if positive else 'at least'} 0")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return a positive number, or None if the file says null. `default` replaces an absent key."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return `count` real numbers; ones if the key is absent."""
        values = self.fields.get(key)
        if values is None:
            return (1.0,) * count
        if not isinstance(values, list) or len(values) != count:
            self.invalid(key, f"where a list of {count} numbers belongs")
        each = {str(index): value for index, value in enumerate(values)}
        part = HFConfig(each, source=f"{self.source}: {key}")
        return tuple(part.number(name, positive=False) for name in each)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self._read(key, default)
        if not isinstance(value, bool):
            self.invalid(key, "where true or false belongs")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` except these; an absent key passes. Raises UnsupportedModel."""
        value = self.fields.get(key)
        if value == "swish":
            value = "silu"
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            self.unsupported(key, f"Supported: {', '.join(_shown(each) for each in allowed) or 'none'}.")

    def activation(self, key: str, default: str) -> Activation:
        """Return the activation of an MLP. Raises UnsupportedModel if it is not implemented."""
        self.expect(key, *ACTIVATIONS)
        return ACTIVATIONS[self._read(key, default)]

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
            rope, trained = self._rope(head_dim, trained, theta, partial_rotary)
        elif self.rope_scaling_factor > 0:
            raise UnsupportedModel(
                f"rope_scaling_factor = {self.rope_scaling_factor} asks for dynamic NTK scaling, and the model of "
                f"{self.source} has no rotary positions. Set rope_scaling_factor=0."
            )
        return {
            "architecture": architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size", intermediate_size or _MISSING),
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
        kinds = self._read("layer_types", default)
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.invalid("layer_types", f"where a list of {num_layers} layer kinds belongs")
        if any(kind not in allowed for kind in kinds):
            self.unsupported("layer_types", f"Supported: {', '.join(map(repr, allowed))}.")
        return kinds

    def _read(self, key: str, default: Any) -> Any:
        value = self.fields.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise InvalidCheckpoint(f"{self.source}: {key} is missing. Complete the file.")
        return default

    def _dtype(self) -> str:
        key = "dtype" if self.fields.get("dtype") is not None else "torch_dtype"
        value = self._read(key, "auto")
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
        chunks = HFConfig(entries, source=f"{self.source}: dual_chunk_attention_config")
        return min(trained, chunks.integer("chunk_size", trained, maximum=MAX_POSITION))

    def _rope(self, head_dim: int, trained: int, default_theta: float, partial: float | None) -> tuple[RopeConfig, int]:
        """Return the rotary embedding, and the number of positions that it allows a model trained on `trained`."""
        scaling = self.rope_fields()
        dim = self._rotated(scaling, head_dim, partial)
        theta = scaling.number("rope_theta", self.number("rope_theta", default_theta))
        if theta <= 1:
            self.invalid("rope_theta", "which must be above 1")
        kind = _ROPE_KINDS.get(str(scaling.fields.get("rope_type") or scaling.fields.get("type") or "default"))
        if kind is None:
            scaling.unsupported(
                "rope_type" if scaling.fields.get("rope_type") else "type", f"Supported: {', '.join(_ROPE_KINDS)}."
            )
        if self.rope_scaling_factor > 0:
            if kind not in ("default", "dynamic"):
                raise UnsupportedModel(
                    f"rope_scaling_factor = {self.rope_scaling_factor} asks for dynamic NTK scaling, and {self.source} "
                    f"already scales by {kind}. Set rope_scaling_factor=0."
                )
            rope = RopeConfig(
                kind="dynamic",
                theta=theta,
                dim=dim,
                factor=self.rope_scaling_factor,
                original_max_position=trained,
            )
            return rope, min(int(trained * self.rope_scaling_factor), MAX_POSITION)
        if kind == "default":
            return RopeConfig(theta=theta, dim=dim), trained
        if kind == "proportional":
            factor = scaling.number("factor", 1.0)
            return RopeConfig(kind=kind, theta=theta, dim=head_dim, factor=factor, rotated_pairs=dim // 2), trained
        if kind in ("linear", "dynamic"):
            factor = scaling.number("factor")
            if factor < 1:
                scaling.invalid("factor", "which must be at least 1")
            if kind == "dynamic" and dim == 2:
                self.invalid("head_dim", "too small for dynamic rotary scaling")
            rope = RopeConfig(kind=kind, theta=theta, dim=dim, factor=factor, original_max_position=trained)
            return rope, min(int(trained * factor), MAX_POSITION)
        original = self._original_max_position(scaling, trained)
        if kind == "longrope":
            return self._longrope(scaling, dim, theta, trained, original), trained
        factor = scaling.number("factor", max(1.0, trained / original))
        if kind == "llama3":
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            if low > high:
                scaling.invalid("low_freq_factor", f"which must not be above high_freq_factor = {high}")
            rope = RopeConfig(
                kind=kind,
                theta=theta,
                dim=dim,
                factor=factor,
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
            return rope, trained
        rope = RopeConfig(
            kind=kind,
            theta=theta,
            dim=dim,
            factor=factor,
            original_max_position=original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
        return rope, max(trained, min(int(original * factor), MAX_POSITION))

    def rope_fields(self) -> HFConfig:
        """Return `rope_parameters`, else InternLM's `rotary`, else `rope_scaling`, as a config; empty if there is
        none."""
        keys = ("rope_parameters", "rotary", "rope_scaling")
        # In GPT-J rotary is a boolean; in InternLM it is an object.
        key = next((key for key in keys if self.fields.get(key) not in (None, True)), keys[0])
        fields = self._rotary() if key == "rotary" else self.fields.get(key)
        if fields is None:
            return HFConfig({}, source=f"{self.source}: {key}")
        if not isinstance(fields, dict):
            self.invalid(key, "where an object belongs")
        unknown = sorted(set(fields) - _ROPE_KEYS)
        if unknown:
            self.unsupported(key, f"Unknown entries: {', '.join(unknown)}.")
        scaling = HFConfig(fields, source=f"{self.source}: {key}")
        for name in _UNREAD_FACTORS:
            scaling.expect(name, 1, 1.0)
        return scaling

    def _rotary(self) -> dict[str, Any]:
        """Return InternLM's {"base": 10000, "type": "dynamic", "scaling_factor": 1.0} under the usual names."""
        rotary = self.fields["rotary"]
        if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic"):
            self.unsupported("rotary", "Supported: an object of type 'origin' or 'dynamic'.")
        scaling = {"rope_type": "dynamic", "factor": rotary.get("scaling_factor", 1.0)}
        return {"rope_theta": rotary.get("base"), **(scaling if rotary["type"] == "dynamic" else {})}

    def _original_max_position(self, scaling: HFConfig, trained: int) -> int:
        """Return the file's own entry, which takes precedence over the one in its rope entry, as in transformers."""
        inner = scaling.integer("original_max_position_embeddings", trained, maximum=MAX_POSITION)
        return self.integer("original_max_position_embeddings", inner, maximum=MAX_POSITION)

    def _rotated(self, scaling: HFConfig, head_dim: int, partial: float | None) -> int:
        """Return the number of rotated features per head."""
        if partial is None:
            for each in (scaling, self):
                each.expect("partial_rotary_factor", 1.0, 1)
        source = scaling if scaling.fields.get("partial_rotary_factor") is not None else self
        factor = source.number("partial_rotary_factor", partial or 1.0)
        dim = int(head_dim * factor)
        if factor > 1 or dim < 2 or dim % 2:
            source.invalid("partial_rotary_factor", f"which turns {dim} of a head's {head_dim} features")
        return dim

    def _longrope(self, scaling: HFConfig, dim: int, theta: float, trained: int, original: int) -> RopeConfig:
        """Return a longrope config with one set of divisors for the engine's lifetime: switching within a sequence
        would invalidate cached keys."""
        sets = {key: self._divisors(scaling, key, dim // 2) for key in ("short_factor", "long_factor")}
        long = (self.session_len or trained) > original
        ratio = scaling.number("factor", trained / original)
        grown = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
        derived = scaling.number("attention_factor", grown)
        return RopeConfig(
            kind="longrope",
            theta=theta,
            dim=dim,
            original_max_position=original,
            divisors=sets["long_factor" if long else "short_factor"],
            attention_factor=scaling.number("long_mscale" if long else "short_mscale", derived),
        )

    def _divisors(self, scaling: HFConfig, key: str, count: int) -> tuple[float, ...]:
        values = scaling.fields.get(key)
        if not isinstance(values, list) or len(values) != count:
            scaling.invalid(key, f"where a list of {count} numbers belongs")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
                scaling.invalid(key, "which must hold finite numbers above 0")
        return tuple(float(value) for value in values)


def alibi_slopes(num_heads: int, *, max_bias: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """Return the ALiBi slopes of Press et al.: 2^(-max_bias i / n) for i = 1 to n heads, if n is a power of two.
    Otherwise the slopes of the next lower power, followed by every other one of the next higher power. `scale`
    multiplies them."""
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-max_bias * (index + 1) / lower) for index in range(lower)]
    between = [2.0 ** (-max_bias * (2 * index + 1) / (2 * lower)) for index in range(num_heads - lower)]
    return tuple(scale * slope for slope in slopes + between)


def yarn_term(factor: float, multiplier: float = 1.0) -> float:
    """Return 0.1 * multiplier * ln(factor) + 1, as in the YaRN paper; 1 if nothing is stretched."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(scaling: HFConfig, factor: float) -> float:
    """Return the paper's term, or, with DeepSeek's mscale entries, the ratio of two such terms."""
    mscale = scaling.number("mscale", 0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, positive=False)
    derived = yarn_term(factor)
    if mscale and mscale_all_dim:
        derived = yarn_term(factor, mscale) / yarn_term(factor, mscale_all_dim)
    return scaling.number("attention_factor", derived)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", int: "a number", float: "a number"}.get(type(value), repr(value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
