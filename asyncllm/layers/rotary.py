"""Rotary position embedding: cosines and sines of a step's positions, under every supported scaling.

A scaling changes the inverse frequencies theta^(-2i/R), and may have an attention factor that multiplies cosines and
sines:

    linear    divided by `factor` (Chen et al., 2023)
    dynamic   theta grows with the prompt's length L beyond max_position (NTK-aware):
              theta * (factor * L / max - (factor - 1)) ^ (R / (R - 2)).
              A sequence keeps the base of its prompt, because its cached keys do.
    qwen      the same by steps: the growth is 2^ceil(log2(L / max) + 1) - 1, at least 1 (Qwen's first generation)
    yarn      high frequencies kept, low ones divided, a ramp between (Peng et al., 2023)
    llama3    the same idea with wavelength bounds (Llama 3.1's reference code)
    longrope  searched divisors per frequency, one set for short and one for long contexts (Ding et al., 2024)
    proportional
              divided by `factor` in the first `rotated_pairs` pairs of a head; the others are not rotated (Gemma 4)
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import Rotation
from asyncllm.layers.axis_positions import AXIS_COLUMNS, axis_positions
from asyncllm.layers.layer import Layer
from asyncllm.layers.step_inputs import Column, StepInputs

__all__ = ["ROPE_LENS", "LogScaling", "QueryScaling", "RopeConfig", "RopeKind", "RotaryEmbedding"]

ROPE_LENS = Column(name="rope_lens", dtype=torch.int64, per="token", padding=1, of_slot=lambda start: start.num_prompt)
"""The prompt length of each token's sequence, which determines its dynamic NTK base."""

RopeKind = Literal["default", "linear", "dynamic", "qwen", "yarn", "llama3", "longrope", "proportional"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A rotary embedding, checked by `models.rope`. A kind reads only the fields that name it."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    dim: int
    """Rotated features per head: R, even."""
    factor: float = 1.0
    """linear, dynamic, yarn, llama3, proportional."""
    rotated_pairs: int = 0
    """proportional: how many of the R/2 pairs are rotated."""
    original_max_position: int = 0
    """dynamic, qwen: where growth begins; yarn, llama3, longrope: the context before extension."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: rotations within the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: rotations below which a frequency is divided by factor."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole dimensions."""
    divisors: tuple[float, ...] = ()
    """longrope: the short or the long set, R/2 numbers."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies cosines and sines."""
    axes: tuple[int, ...] = ()
    """For each of the R/2 pairs, the axis (time, row, column) whose position rotates it. Empty: the token's single
    position. All 0: the position along time, which images shift."""

    @property
    def by_prompt(self) -> bool:
        """Whether a sequence's rotation depends on the length of its prompt."""
        return self.kind in ("dynamic", "qwen")


class LogScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scales queries beyond the first `length` tokens by the logarithm of their position to that base (Su, 2021)."""

    length: int
    nope_layers_only: ClassVar[bool] = False
    """See `QueryScaling`."""

    def scales(self, positions: Tensor) -> Tensor:
        """positions [T], counted from 0 -> [T, 1, 1] float32."""
        return ((positions + 1).log() / math.log(self.length)).clamp_(min=1.0)[:, None, None]


class QueryScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scales queries with their position, counted from 0, so that scores in long contexts do not flatten out: by 1 +
    weight * log of 1 + floor((position + ahead) / length) (Llama 4)."""

    length: int
    weight: float
    ahead: int = 0
    nope_layers_only: bool = False
    """Whether only layers without rotation scale queries."""

    def scales(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, 1, 1] float32."""
        steps = (positions + self.ahead).div(self.length, rounding_mode="floor")
        return steps.float().log1p_().mul_(self.weight).add_(1.0)[:, None, None]


class RotaryEmbedding(Layer):
    """Computes the rotation of a step's tokens, once for all layers."""

    columns: tuple[Column, ...]
    """The step columns that this embedding reads besides the positions."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.columns = (ROPE_LENS,) if config.by_prompt else ()
        if config.axes:
            self.columns = (*self.columns, *AXIS_COLUMNS)
            self.register_buffer("axes", torch.tensor(config.axes, device=device), persistent=False)
            self.axes: Tensor
        exponents = torch.arange(0, config.dim, 2, dtype=torch.float32, device=device) / config.dim
        self.register_buffer("exponents", exponents, persistent=False)
        self.register_buffer("inv_freq", _inverse_frequencies(config, exponents), persistent=False)
        self.exponents: Tensor
        self.inv_freq: Tensor

    def forward(self, step: StepInputs) -> Rotation:
        config = self.config
        frequencies = self._dynamic_frequencies(step[ROPE_LENS]) if config.by_prompt else self.inv_freq
        if config.axes:
            # Each pair is rotated by its own position, which is folded into its frequency.
            along = axis_positions(step)[self.axes].T
            return kernels.rotation(torch.ones_like(step.positions), along * frequencies, config.attention_factor)
        return kernels.rotation(step.positions, frequencies, config.attention_factor)

    def _dynamic_frequencies(self, rope_lens: Tensor) -> Tensor:
        """[T] -> [T, R/2]. The base is computed in float64, like the quotient of two Python integers."""
        config = self.config
        lengths = rope_lens.double().clamp_(min=config.original_max_position)
        if config.kind == "qwen":
            growth = torch.exp2(torch.ceil(torch.log2(lengths / config.original_max_position) + 1)) - 1
        else:
            growth = config.factor * lengths / config.original_max_position - (config.factor - 1)
        bases = (config.theta * growth ** (config.dim / (config.dim - 2))).float()
        return 1.0 / bases[:, None] ** self.exponents


def _inverse_frequencies(config: RopeConfig, exponents: Tensor) -> Tensor:
    """Return the inverse frequencies [R/2] float32."""
    wavelengths = config.theta**exponents
    if config.kind == "longrope":
        divisors = torch.tensor(config.divisors, dtype=torch.float32, device=exponents.device)
        return 1.0 / (divisors * wavelengths)
    frequencies = 1.0 / wavelengths
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "proportional":
        frequencies = frequencies / config.factor
        frequencies[config.rotated_pairs :] = 0.0
        return frequencies
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        kept = _yarn_kept(config, exponents.device)
        return 1.0 / (config.factor * wavelengths) * (1 - kept) + frequencies * kept
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Divide wavelengths above original / low_freq_factor, keep those below original / high_freq_factor, blend
    between."""
    rotations = config.original_max_position * frequencies / (2 * math.pi)
    kept = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    # If the bounds are equal, nothing lies between them.
    kept = kept.clamp(0, 1).nan_to_num(0.0)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn_kept(config: RopeConfig, device: torch.device) -> Tensor:
    """Return how much of each frequency is kept, [R/2] in [0, 1]: a linear ramp over the dimensions between the two
    betas."""

    def dimension(rotations: float) -> float:
        return (
            config.dim
            * math.log(config.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)
