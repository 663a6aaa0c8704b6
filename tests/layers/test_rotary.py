"""Rotary frequencies against the formulas of their papers; the parity tests have them against transformers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncllm.kernels import Rotation
from asyncllm.layers.rotary import ROPE_LENS, RopeConfig, RotaryEmbedding
from tests.layers.steps import step_at

CPU = torch.device("cpu")


def halves(rotation: Rotation) -> Tensor:
    """[T, R]: the cosines and the sines of the angles, once each."""
    cos, sin = rotation.cos[:, 0], rotation.sin[:, 0]
    half = cos.shape[-1] // 2
    assert torch.equal(cos[:, :half], cos[:, half:])
    assert torch.equal(sin[:, :half], -sin[:, half:])
    return torch.cat([cos[:, :half], sin[:, half:]], -1)


def frequencies(rope: RopeConfig) -> torch.Tensor:
    return RotaryEmbedding(rope, CPU).inv_freq


def test_plain_frequencies_and_table() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=10000.0, dim=4), CPU)
    torch.testing.assert_close(rotary.inv_freq, torch.tensor([1.0, 0.01]))
    table = halves(rotary(step_at([0, 3])))
    expected = [[1, 1, 0, 0], [math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]]
    torch.testing.assert_close(table, torch.tensor(expected))


def test_linear_divides_every_frequency() -> None:
    plain = frequencies(RopeConfig(theta=1e6, dim=64))
    assert torch.equal(frequencies(RopeConfig(kind="linear", theta=1e6, dim=64, factor=4.0)), plain / 4)


def test_dynamic_takes_each_sequences_own_base() -> None:
    rope = RopeConfig(kind="dynamic", theta=10000.0, dim=8, factor=2.0, original_max_position=32)
    rotary = RotaryEmbedding(rope, CPU)
    positions = [5, 5, 40]
    assert rotary.columns == (ROPE_LENS,)
    table = halves(rotary(step_at(positions, [10, 32, 80])))
    base = 10000.0 * (2.0 * 80 / 32 - 1) ** (8 / 6)
    for row, theta in enumerate([10000.0, 10000.0, base]):
        plain = halves(RotaryEmbedding(RopeConfig(theta=theta, dim=8), CPU)(step_at(positions[row : row + 1])))
        torch.testing.assert_close(table[row : row + 1], plain)


def test_llama3_keeps_high_and_divides_low_frequencies() -> None:
    rope = RopeConfig(
        kind="llama3",
        theta=500000.0,
        dim=128,
        factor=8.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    plain, scaled = frequencies(RopeConfig(theta=500000.0, dim=128)), frequencies(rope)
    rotations = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[rotations > 4], plain[rotations > 4])
    assert torch.equal(scaled[rotations < 1], plain[rotations < 1] / 8)
    between = (rotations > 1) & (rotations < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_ramp_with_equal_ends_is_finite() -> None:
    rope = RopeConfig(kind="yarn", theta=10000.0, dim=8, factor=4.0, original_max_position=1)
    assert torch.isfinite(frequencies(rope)).all()


def test_attention_factor_multiplies_cosines_and_sines() -> None:
    rope = RopeConfig(kind="longrope", dim=4, divisors=(1.0, 2.0), attention_factor=1.25)
    table = halves(RotaryEmbedding(rope, CPU)(step_at([0])))
    assert table.tolist() == [[1.25, 1.25, 0, 0]]


def test_angles_of_late_positions_are_exact_to_float32() -> None:
    table = halves(RotaryEmbedding(RopeConfig(theta=500000.0, dim=128), CPU)(step_at([131071])))
    assert abs(table[0, 0].item() - math.cos(131071)) < 1e-6
