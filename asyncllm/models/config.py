"""Reading config.json: typed, and refusing what is not implemented.

`HFConfig` wraps the file; a family's `configure` reads from it what the family knows and returns a `ModelConfig`. Both
schemas of the file are read: the legacy one (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one that
transformers 5 writes (`rope_parameters`, `dtype`, `layer_types`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.layers.rotary import RopeConfig, RopeKind

__all__ = ["HFConfig", "ModelConfig"]

MAX_SIZE = 2**24
"""Above any width, vocabulary or context in use; products of a few sizes below it still fit 64 bits."""
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_POSITION = 2**31 - 1
MAX_NUMBER = 1e30
"""Above any real number in use; whole numbers beyond 1e308 would not even convert."""

DTYPES = ("float32", "bfloat16", "float16")

_MISSING: Any = object()

_ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
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
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
        "finetuned",
    }
)
"""Entries that are read, and `finetuned`, a remark of early YaRN files. Any other may change the computation."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is, checked. Written by a family's `configure`; families add fields in subclasses."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Positions that training and rotary scaling allow."""
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16."""
    rms_eps: float
    tied: bool
    """The output embedding reads the token embedding's table."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer, how many latest positions a query sees; None: all."""
    num_parameters: int = 0
    """Written by `registry.open_model` once the model is built."""

    @property
    def dynamic_rope(self) -> bool:
        """Whether the model asks for StepInputs.rope_lens."""
        return self.rope.kind == "dynamic"


class HFConfig:
    """config.json with typed reads. `null` counts as absent.

    `session_len` and `rope_scaling_factor` are what the engine was asked for; rotary reading depends on them.
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
        """Read `folder`/config.json, with entries replaced by `overrides`. Raises InvalidCheckpoint."""
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
            {**fields, **(overrides or {})},
            source=str(file),
            session_len=session_len,
            rope_scaling_factor=rope_scaling_factor,
        )

    def invalid(self, key: str, what: str) -> NoReturn:
        """Raise InvalidCheckpoint for a value that cannot be right."""
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

    def optional_integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """An integer, or None where the file says null. An absent key gives `default`."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.integer(key, minimum=minimum)

    def number(self, key: str, default: Any = _MISSING, *, positive: bool = True) -> float:
        value = self._read(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            self.invalid(key, "where a finite number belongs")
        if value < 0 or (positive and value == 0):
            self.invalid(key, f"which must be {'above' if positive else 'at least'} 0")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None where the file says null. An absent key gives `default`."""
        if key in self.fields and self.fields[key] is None:
            return None
        return default if key not in self.fields else self.number(key)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self._read(key, default)
        if not isinstance(value, bool):
            self.invalid(key, "where true or false belongs")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` but these; an absent key passes. Raises UnsupportedModel."""
        value = self.fields.get(key)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            self.unsupported(key, f"Supported: {', '.join(_shown(each) for each in allowed)}.")

    def decoder(
        self,
        architecture: str,
        *,
        max_position: int = 2048,
        theta: float = 10000.0,
        head_dim: int | None = None,
        rms_eps: float = 1e-6,
        tied: bool = False,
    ) -> dict[str, Any]:
        """The fields of a ModelConfig that all families read alike; the arguments stand in for keys that are absent.

        Raises InvalidCheckpoint for wrong types and impossible sizes, UnsupportedModel for quantized checkpoints.
        """
        for key in ("quantization_config", "compression_config"):
            if self.fields.get(key) is not None:
                self.unsupported(key, "Use the checkpoint in bfloat16, float16 or float32.")
        self.expect("use_logn_attn", False)
        self.expect("partial_rotary_factor", 1.0, 1)
        hidden_size = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads", maximum=2**16)
        num_kv_heads = self.integer("num_key_value_heads", num_heads, maximum=2**16)
        if num_heads % num_kv_heads:
            self.invalid("num_key_value_heads", f"which does not divide num_attention_heads = {num_heads}")
        head_dim = self.optional_integer("head_dim", head_dim)
        if head_dim is None:
            if hidden_size % num_heads:
                self.invalid("num_attention_heads", f"which does not divide hidden_size = {hidden_size}")
            head_dim = hidden_size // num_heads
        if head_dim % 2 or head_dim > 2**14:
            self.invalid("head_dim", f"giving heads of {head_dim}, where rotary embedding needs an even size")
        num_layers = self.integer("num_hidden_layers", maximum=MAX_LAYERS)
        trained = self.integer("max_position_embeddings", max_position, maximum=MAX_POSITION)
        rope, max_position = self._rope(head_dim, trained, theta)
        return {
            "architecture": architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position": max_position,
            "dtype": self._dtype(),
            "rms_eps": self.number("rms_norm_eps", rms_eps, positive=False),
            "tied": self.flag("tie_word_embeddings", tied),
            "rope": rope,
            "windows": (None,) * num_layers,
        }

    def windows(self, num_layers: int, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
        """`window` for the sliding layers. `sliding` is the family's rule, which a `layer_types` list replaces."""
        kinds = self.fields.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                self.invalid("layer_types", f"where a list of {num_layers} layer kinds belongs")
            for kind in kinds:
                if kind not in ("full_attention", "sliding_attention"):
                    self.unsupported("layer_types", "Supported: 'full_attention', 'sliding_attention'.")
            sliding = [kind == "sliding_attention" for kind in kinds]
            if window is None and any(sliding):
                self.invalid("layer_types", "which names sliding layers, but sliding_window is not set")
        return tuple(window if slides else None for slides in sliding)

    def _read(self, key: str, default: Any) -> Any:
        value = self.fields.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise InvalidCheckpoint(f"{self.source}: {key} is missing. Complete the file.")
        return default

    def _dtype(self) -> str:
        key = "dtype" if self.fields.get("dtype") is not None else "torch_dtype"
        value = self._read(key, "float32")
        if value not in DTYPES:
            self.unsupported(key, f"Supported: {', '.join(DTYPES)}.")
        return str(value)

    def _rope(self, head_dim: int, trained: int, default_theta: float) -> tuple[RopeConfig, int]:
        """The rotary embedding, and the positions that it allows a model trained on `trained` of them."""
        scaling = self._rope_fields()
        theta = scaling.number("rope_theta", self.number("rope_theta", default_theta))
        if theta <= 1:
            self.invalid("rope_theta", "which must be above 1")
        kind = _ROPE_KINDS.get(str(scaling.fields.get("rope_type") or scaling.fields.get("type") or "default"))
        if kind is None:
            scaling.unsupported(
                "rope_type" if scaling.fields.get("rope_type") else "type", f"Supported: {', '.join(_ROPE_KINDS)}."
            )
        scaling.expect("partial_rotary_factor", 1.0, 1)
        if self.rope_scaling_factor > 0:
            if kind not in ("default", "dynamic"):
                raise UnsupportedModel(
                    f"rope_scaling_factor = {self.rope_scaling_factor} asks for dynamic NTK scaling, and {self.source} "
                    f"already scales by {kind}. Set rope_scaling_factor=0."
                )
            rope = RopeConfig(
                kind="dynamic",
                theta=theta,
                dim=head_dim,
                factor=self.rope_scaling_factor,
                original_max_position=trained,
            )
            return rope, min(int(trained * self.rope_scaling_factor), MAX_POSITION)
        if kind == "default":
            return RopeConfig(theta=theta, dim=head_dim), trained
        if kind in ("linear", "dynamic"):
            factor = scaling.number("factor")
            if factor < 1:
                scaling.invalid("factor", "which must be at least 1")
            if kind == "dynamic" and head_dim == 2:
                self.invalid("head_dim", "too small for dynamic rotary scaling")
            rope = RopeConfig(kind=kind, theta=theta, dim=head_dim, factor=factor, original_max_position=trained)
            return rope, min(int(trained * factor), MAX_POSITION)
        original = self._original_max_position(scaling, trained)
        if kind == "longrope":
            return self._longrope(scaling, head_dim, theta, trained, original), trained
        factor = scaling.number("factor", max(1.0, trained / original))
        if kind == "llama3":
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            if low >= high:
                scaling.invalid("low_freq_factor", f"which must be below high_freq_factor = {high}")
            rope = RopeConfig(
                kind=kind,
                theta=theta,
                dim=head_dim,
                factor=factor,
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
            return rope, trained
        rope = RopeConfig(
            kind=kind,
            theta=theta,
            dim=head_dim,
            factor=factor,
            original_max_position=original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
        return rope, max(trained, min(int(original * factor), MAX_POSITION))

    def _rope_fields(self) -> HFConfig:
        """`rope_parameters`, else `rope_scaling`, as a config of its own; empty if there is neither."""
        key = "rope_parameters" if self.fields.get("rope_parameters") is not None else "rope_scaling"
        fields = self.fields.get(key)
        if fields is None:
            return HFConfig({}, source=f"{self.source}: {key}")
        if not isinstance(fields, dict):
            self.invalid(key, "where an object belongs")
        unknown = sorted(set(fields) - _ROPE_KEYS)
        if unknown:
            self.unsupported(key, f"Unknown entries: {', '.join(unknown)}.")
        return HFConfig(fields, source=f"{self.source}: {key}")

    def _original_max_position(self, scaling: HFConfig, trained: int) -> int:
        """The file's own entry wins over the one in its rope entry, as transformers has it."""
        inner = scaling.integer("original_max_position_embeddings", trained, maximum=MAX_POSITION)
        return self.integer("original_max_position_embeddings", inner, maximum=MAX_POSITION)

    def _longrope(self, scaling: HFConfig, head_dim: int, theta: float, trained: int, original: int) -> RopeConfig:
        """One set of divisors for the engine's whole life: a switch in mid-sequence would invalidate cached keys."""
        sets = {key: self._divisors(scaling, key, head_dim // 2) for key in ("short_factor", "long_factor")}
        long = (self.session_len or trained) > original
        ratio = scaling.number("factor", trained / original)
        grown = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
        return RopeConfig(
            kind="longrope",
            theta=theta,
            dim=head_dim,
            original_max_position=original,
            divisors=sets["long_factor" if long else "short_factor"],
            attention_factor=scaling.number("attention_factor", grown),
        )

    def _divisors(self, scaling: HFConfig, key: str, count: int) -> tuple[float, ...]:
        values = scaling.fields.get(key)
        if not isinstance(values, list) or len(values) != count:
            scaling.invalid(key, f"where a list of {count} numbers belongs")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
                scaling.invalid(key, "which must hold finite numbers above 0")
        return tuple(float(value) for value in values)


def _yarn_attention_factor(scaling: HFConfig, factor: float) -> float:
    """0.1 ln(factor) + 1 of the YaRN paper; DeepSeek's mscale entries make it a ratio of two such terms."""

    def term(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = scaling.number("mscale", 0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, positive=False)
    derived = term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)
    return scaling.number("attention_factor", derived)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", int: "a number", float: "a number"}.get(type(value), repr(value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
