"""Sampling kernels: known answers, float64 and plain-Python oracles, and independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import sampling

RANDOM123 = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Counter, key and words of the known-answer file that comes with Random123."""

TRITON = [
    (42, (7, 3, 0, 0), (3805608058, 1660224728, 1941835070, 3648322504)),
    (42, (5, 4294967295, 77, 4294967294), (542723320, 1040343589, 3151049653, 1433386991)),
    (1234567890123, (7, 3, 0, 0), (2936868854, 2252972382, 828783406, 4259847425)),
    (-5, (5, 4294967295, 77, 4294967294), (3316501300, 750120623, 109271196, 307563923)),
    (2**63 - 1, (7, 3, 0, 0), (3671255487, 3612501662, 1230291108, 3552189141)),
    (-(2**63), (5, 4294967295, 77, 4294967294), (3319532278, 2443986006, 4190496709, 403733116)),
]
"""Seed, counter and words of `tl.philox` (Triton 3.7.1)."""

TRITON_RANDINT4X = {
    42: [3354629496, 2923741036, 3115360699, 4096613964, 2484704854, 3349882593, 1771465211, 666457989],
    -5: [631417262, 1601663761, 2618467817, 3519324911, 1095021408, 4189766469, 2726951519, 781072444],
}
"""Words of `tl.randint4x(seed, offset)` at offsets 1000 and 1001 (Triton 3.7.1)."""


NOISE_BITS = [1102511529, 1102148120, 1095509949, 1067415969, 1065851097, -2147483648, -1096336230, -1070337975]
MASSES = [1098412654592, 814538227712, 737024671744, 404487733248, 497888832, 2266]


def philox_words(seed: int, counter: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    return tuple(int(word) for word in sampling.philox(torch.tensor([seed]), (c0, c1, c2, c3)))


def signed64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox_words(signed64(key[0] + (key[1] << 32)), counter) == words


@pytest.mark.parametrize(("seed", "counter", "words"), TRITON)
def test_philox_equals_triton(seed: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox_words(seed, counter) == words


@pytest.mark.parametrize("seed", TRITON_RANDINT4X)
def test_philox_equals_randint4x(seed: int) -> None:
    words = [*philox_words(seed, (1000, 0, 0, 0)), *philox_words(seed, (1001, 0, 0, 0))]
    assert words == TRITON_RANDINT4X[seed]


def test_philox_broadcasts_rows_against_counters() -> None:
    seeds = torch.tensor([[3], [-(2**40)]])
    zero = torch.zeros(1, dtype=torch.int64)
    words = torch.stack(sampling.philox(seeds, (torch.arange(5), zero, zero, zero)), -1)
    assert words.shape == (2, 5, 4)
    assert tuple(words[1, 4].tolist()) == philox_words(-(2**40), (4, 0, 0, 0))


def test_uniform_is_open_and_resolves_small_words() -> None:
    values = sampling.uniform(torch.tensor([0, 1, 2, 2**31, 2**32 - 1])).tolist()
    assert values == [2.0**-33, 2.0**-32, 2.0**-31, 0.5, 1 - 2.0**-24]


def test_gumbel_noise_follows_its_definition() -> None:
    noise = sampling.gumbel_noise(torch.tensor([9, -4]), torch.tensor([0, 2**33 + 5]), 11)
    assert noise.dtype == torch.float32
    for row, (seed, position) in enumerate([(9, 0), (-4, 2**33 + 5)]):
        for token in range(11):
            word = philox_words(seed, (token // 4, position % 2**32, position >> 32, 0))[token % 4]
            expected = -math.log(-math.log1p(-max(word * 2.0**-32, 2.0**-33)))
            assert noise[row, token].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_gumbel_noise_at_picks_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, positions = torch.arange(-3, 4), torch.arange(7) * 1000
    dense = sampling.gumbel_noise(seeds, positions, 1003)
    ids = torch.stack([torch.randperm(1003, generator=generator)[:37] for _ in range(7)])
    assert torch.equal(sampling.gumbel_noise_at(seeds, positions, ids), dense.gather(-1, ids))


def test_top_tokens_orders_by_value_then_id() -> None:
    row = [0.0, 5.0, -0.0, 5.0, -torch.inf, -2.0, 7.0, -2.0, 1e-40, -1e-40]
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))
    for width in range(len(row) + 3):
        assert sampling.top_tokens(torch.tensor([row]), width)[0].tolist() == expected[:width]


def draw(logits: Tensor, settings: Tensor, positions: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and flags that `sample` writes over poison."""
    tokens = torch.full((len(logits),), -7)
    flags = torch.full((len(logits),), -7, dtype=torch.int32)
    sampling.sample(logits, settings, slots, positions, tokens, flags)
    return tokens, flags


class Rows:
    """Arguments of `sample` for R rows, each with its own settings."""

    def __init__(self, logits: Tensor, settings: list[tuple[float, int, float, float]], first_seed: int = 1) -> None:
        rows = len(logits)
        self.logits = logits
        self.settings = torch.tensor(
            [sampling.pack_settings(*settings[row % len(settings)], seed=first_seed + row) for row in range(rows)]
        )
        self.positions = torch.arange(rows) * 7

    def sample(self, rows: list[int] | None = None) -> list[int]:
        picked = torch.tensor(range(len(self.logits)) if rows is None else rows)
        tokens, flags = draw(self.logits[picked], self.settings[picked], self.positions[picked])
        assert not flags.any()
        return tokens.tolist()


SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (0.8, 1, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.2),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 0.9, 0.0),
    (2.0, 0, 0.95, 0.0),
    (1.5, 0, 0.999, 0.01),
    (1e-30, 0, 1.0, 0.0),
    (1.0, 10**9, 0.3, 0.5),
    (1e38, 0, 0.6, 0.0),
]


def test_mass_is_the_exponential_rounded_down() -> None:
    shifted = torch.cat([torch.linspace(-30, 0, 100_001), torch.tensor([-1e-8, -1e-45, -0.0])])
    exact = shifted.double().exp() * 2.0**40
    masses = sampling.mass(shifted)
    assert ((masses - exact.floor()).abs() <= 2e-7 * exact + 1).all()
    assert masses.max() == 2**40
    assert sampling.mass(torch.tensor([0.0, -28.0, -41.0, -3e38, -torch.inf])).tolist() == [2**40, 0, 0, 0, 0]


def test_noise_has_the_bits_that_every_device_shall_draw() -> None:
    words = torch.tensor([0, 1, 12345, 2**30, 1258291200, 2714937127, 3 * 2**30, 2**32 - 1])
    assert sampling._gumbel(words).view(torch.int32).tolist() == NOISE_BITS
    assert sampling.mass(torch.tensor([-1e-3, -0.3, -0.4, -1.0, -7.7, -20.0])).tolist() == MASSES


@pytest.mark.parametrize(
    ("value", "flag"),
    [(torch.nan, sampling.NOT_FINITE), (torch.inf, sampling.NOT_FINITE), (-torch.inf, sampling.NOTHING_LEFT)],
)
@pytest.mark.parametrize("setting", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0)])
def test_failed_rows_and_rows_without_a_slot_are_told(
    value: float, flag: int, setting: tuple[float, int, float, float]
) -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    good = Rows(logits, [setting])
    expected = good.sample()
    logits[1, 7:] = value
    if flag == sampling.NOTHING_LEFT:
        logits[1] = value
    slots = torch.tensor([0, 1, -1, 3])
    tokens, flags = draw(logits, good.settings, good.positions, slots)
    assert flags.tolist() == [0, flag, 0, 0]
    assert tokens.tolist() == [expected[0], 0, 0, expected[3]]


def test_slots_choose_settings() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    rows = Rows(logits, [(1.0, 0, 1.0, 0.0), (2.0, 9, 0.9, 0.0), (0.0, 0, 1.0, 0.0)])
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    assert draw(logits, rows.settings[order.argsort()], rows.positions, order)[0].tolist() == rows.sample()


def test_settings_pack_into_64_bits() -> None:
    assert sampling.pack_settings(0.0, 0, 1.0, 0.0, 2**64 - 1)[0] == -1
    assert sampling.pack_settings(0.0, 7, 1.0, 0.25, 3)[1:4:2] == (7, 2**38)
    bits = [sampling.pack_settings(temperature, 0, 1.0, 0.0, 0)[4] for temperature in (0.0, 1e-60, 0.5, 1e-45, 1e300)]
    reciprocals = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert reciprocals.tolist() == [0.0, 0.0, 2.0, 2.0**126, 2.0**-126]


def test_logits_of_16_bits_draw_what_their_float32_values_do() -> None:
    logits = torch.randn(11, 500, generator=torch.Generator().manual_seed(6)).bfloat16()
    narrow, wide = Rows(logits, SETTINGS), Rows(logits.float(), SETTINGS)
    assert narrow.sample() == wide.sample()


@pytest.mark.parametrize("vocab_size", [50, 1031])
def test_a_row_does_not_see_its_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator) * 2
    logits[::3] = logits[::3].bfloat16().float()
    rows = Rows(logits, SETTINGS)
    together = rows.sample()
    assert [rows.sample([row])[0] for row in range(40)] == together
    order = torch.randperm(40, generator=generator).tolist()
    assert rows.sample(order) == [together[row] for row in order]
    assert rows.sample(order[:13]) == [together[row] for row in order[:13]]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 4)
    rows = Rows(logits, [(0.0, 0, 1.0, 0.0), (0.9, 1, 1.0, 0.0), (1e-40, 2, 1.0, 0.0), (1.0, 0, 0.0, 1.0)])
    tokens = rows.sample()
    assert tokens[:2] == [1, 1]
    assert tokens[2] in (1, 2)
    assert tokens[3] == 1


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 100_000)
    same = [Rows(logits, [(1.0, 0, 1.0, 0.0)], first_seed=5).sample() for _ in range(2)]
    other = Rows(logits, [(1.0, 0, 1.0, 0.0)], first_seed=6).sample()
    moved = Rows(logits, [(1.0, 0, 1.0, 0.0)], first_seed=5)
    moved.positions += 1
    assert same[0] == same[1]
    assert len({same[0][0], other[0], moved.sample()[0]}) == 3


def oracle_set(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Tokens left by the filters and their probabilities, in float64."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = [token for token in order if row[token] > -math.inf][: top_k or None]
    weights = [math.exp((row[token] - row[order[0]]) / temperature) for token in order]
    kept: dict[int, float] = {}
    total, before = math.fsum(weights), 0.0
    for token, weight in zip(order, weights, strict=True):
        if (kept and top_p < 1 and before >= top_p * total) or weight < min_p:
            break
        kept[token] = weight
        before += weight
    mass = math.fsum(kept.values())
    return {token: weight / mass for token, weight in kept.items()}


def drawn_counts(row: Tensor, setting: tuple[float, int, float, float], draws: int) -> list[int]:
    rows = Rows(row.expand(draws, -1), [setting])
    return torch.bincount(torch.tensor(rows.sample()), minlength=len(row)).tolist()


@pytest.mark.parametrize(
    "setting",
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.15),
        (1.2, 9, 0.7, 0.0),
        (1.5, 12, 0.9, 0.2),
        (1.0, 0, 0.9, 0.1),
    ],
)
def test_draws_follow_the_filtered_distribution(setting: tuple[float, int, float, float]) -> None:
    row = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 1.5
    row[4] = row[9]
    row[17] = -torch.inf
    draws = 20_000
    counts = drawn_counts(row, setting, draws)
    expected = oracle_set(row.tolist(), *setting)
    assert {token for token, count in enumerate(counts) if count} <= expected.keys()
    statistic = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in expected.items())
    freedom = len(expected) - 1
    # Wilson and Hilferty: the chi-square quantile that chance exceeds once in about 30,000 times (4 sigma).
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0
    assert statistic <= limit


def kept_by_kernel(row: Tensor, setting: tuple[float, int, float, float]) -> set[int]:
    """Which tokens can be drawn: at a huge temperature, draws from few tokens hit each of them."""
    return {token for token, count in enumerate(drawn_counts(row, setting, 1500)) if count}


@pytest.mark.parametrize("seed", range(6))
def test_filters_keep_exactly_the_oracles_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = (torch.randn(300, generator=generator) * 0.3).bfloat16().float()
    for setting in [(1.0, 1 + seed * 3, 1.0, 0.0), (1.0, 0, 0.01 * (seed + 1), 0.0), (1.0, 30, 0.1 * (seed + 1), 0.0)]:
        expected = oracle_set(row.tolist(), *setting)
        assert len(expected) < 60
        assert kept_by_kernel(row, setting) == set(expected)


def test_a_nucleus_wider_than_the_first_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 0.1
    setting = (1.0, 0, 0.7, 0.0)
    expected = oracle_set(row.tolist(), *setting)
    assert kept_by_kernel(row, setting) == set(expected)
    draws = drawn_counts(row, setting, 500)
    monkeypatch.setattr(sampling, "_NUCLEUS_WIDTH", 8)
    assert len(expected) > 8
    assert drawn_counts(row, setting, 500) == draws


def test_tiny_temperature_and_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, -torch.inf]] * 3)
    rows = Rows(logits, [(1e-38, 0, 1.0, 0.0), (1e-45, 3, 0.9, 0.0), (1e-38, 0, 0.9, 0.1)])
    assert rows.sample() == [0, 0, 0]


def test_penalties_equal_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 30, generator=generator) * 5
    logits[0, 3] = -torch.inf
    seen = torch.rand(4, 30, generator=generator) < 0.5
    counts = torch.randint(0, 4, (4, 30), generator=generator) * seen
    repetition = torch.tensor([1.0, 1.3, 0.7, 2.0])
    presence = torch.tensor([0.5, 0.0, -1.0, 2.0])
    frequency = torch.tensor([0.1, -0.5, 0.0, 1.5])
    result = sampling.penalize(logits.clone(), seen, counts, repetition, presence, frequency)
    for row in range(4):
        for token in range(30):
            value = logits[row, token].item()
            if seen[row, token]:
                value = value / repetition[row].item() if value > 0 else value * repetition[row].item()
            if counts[row, token]:
                value -= presence[row].item() + frequency[row].item() * counts[row, token].item()
            assert result[row, token].item() == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_bias_and_bans_touch_only_their_entries() -> None:
    logits = torch.zeros(3, 5)
    sampling.add_bias(logits, torch.tensor([0, 0, 2]), torch.tensor([1, 4, 1]), torch.tensor([2.0, -3.0, 100.0]))
    sampling.ban(logits, torch.tensor([1, 2]), torch.tensor([0, 1]))
    inf = torch.inf
    assert logits.tolist() == [[0, 2, 0, 0, -3], [-inf, 0, 0, 0, 0], [0, -inf, 0, 0, 0]]


def test_token_logprobs_equal_float64() -> None:
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(2)) * 4
    logits[:, 20] = logits[:, 10] = logits.max() + 1
    tokens = torch.tensor([0, 10, 20, 59, 3])
    chosen, top, ids = sampling.token_logprobs(logits, tokens, 4)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(chosen.double(), exact.gather(-1, tokens[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(top.double(), exact.gather(-1, ids), atol=1e-6)
    assert ids[:, :2].tolist() == [[10, 20]] * 5
    assert torch.equal(ids, exact.sort(dim=-1, descending=True, stable=True).indices[:, :4])
    for row in range(5):
        alone = sampling.token_logprobs(logits[row : row + 1], tokens[row : row + 1], 4)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, (chosen, top, ids), strict=True))


def test_no_most_likely_tokens_on_request_of_none() -> None:
    chosen, top, ids = sampling.token_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 0)
    assert chosen.tolist() == pytest.approx([math.log(0.25)] * 2)
    assert top.shape == ids.shape == (2, 0)


def test_the_quick_choice_of_candidates_changes_nothing() -> None:
    logits = (torch.randn(60, 400, generator=torch.Generator().manual_seed(7)) * 2).round()
    rows = Rows(logits, [(1.0, 0, 1.0, 0.0), (0.4, 0, 1.0, 0.05), (30.0, 0, 1.0, 0.0)])
    reciprocal = rows.settings[:, 4].to(torch.int32).view(torch.float32)
    shifted = sampling.shift(logits, logits.amax(-1), reciprocal)
    shifted = sampling.apply_min_p(shifted, None, rows.settings[:, 3])
    noise = sampling.gumbel_noise(rows.settings[:, 0], rows.positions, 400)
    assert (noise + shifted).argmax(-1).tolist() == rows.sample()


def test_the_chi_square_notices_noise_that_is_not_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = sampling.uniform
    monkeypatch.setattr(sampling, "uniform", lambda words: uniform(words // 2))
    with pytest.raises(AssertionError):
        test_draws_follow_the_filtered_distribution((1.0, 0, 1.0, 0.0))
