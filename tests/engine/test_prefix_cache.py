"""The prefix cache: keys stand for whole prefixes; least recently used blocks are evicted first, pinned ones last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.engine.cache.prefix_cache import PrefixCache, PrefixRoot, extend_hashes, root_hash
from tests.engine.driver import Driver

tokens = st.lists(st.integers(0, 2), max_size=24)


def chain(token_ids: list[int], block_size: int = 2, root: bytes | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash() if root is None else root, token_ids, block_size)
    return hashes


def filled(count: int) -> tuple[PrefixCache, list[bytes]]:
    """A cache that knows blocks 0 to count - 1 under unrelated keys, all idle, block 0 the least recently used."""
    cache = PrefixCache()
    names = [root_hash(bytes([index])) for index in range(count)]
    for block, key in enumerate(names):
        cache.commit(key, block)
        assert cache.retain(block)
    return cache, names


@settings(deadline=None, derandomize=True)
@given(first=tokens, second=tokens, block_size=st.integers(1, 4))
def test_keys_agree_exactly_as_far_as_the_full_blocks_do(first: list[int], second: list[int], block_size: int) -> None:
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    one, other = chain(first, block_size), chain(second, block_size)
    assert len(one) == len(first) // block_size
    agreeing = [a == b for a, b in zip(one, other, strict=False)]
    assert agreeing == [index < common // block_size for index in range(len(agreeing))]


@settings(deadline=None, derandomize=True)
@given(token_ids=tokens, cut=st.integers(0, 24))
def test_extending_in_two_goes_gives_the_same_chain(token_ids: list[int], cut: int) -> None:
    hashes = chain(token_ids[:cut])
    extend_hashes(hashes, root_hash(), token_ids, 2)
    assert hashes == chain(token_ids)


def test_a_key_stands_for_its_root_its_parent_and_its_tokens() -> None:
    base = chain([1, 2, 3, 4])
    assert base[1] not in chain([9, 9, 3, 4]), "same tokens, other parent"
    assert base[0] not in chain([1, 2], root=root_hash(b"adapter")), "same tokens, other root"
    assert base[0] not in chain([2, 1]), "other tokens"
    assert base[0] not in chain([1, 2, 3, 4], block_size=1), "other block size"
    assert chain([1, 2**40])[0] != chain([1, 0])[0], "ids are not cut to 32 bits"


def test_parts_of_a_root_do_not_run_into_each_other() -> None:
    assert root_hash(b"ab", b"c") != root_hash(b"a", b"bc") != root_hash(b"abc")
    roots = [PrefixRoot(), *(PrefixRoot()._replace(**{name: "1"}) for name in PrefixRoot._fields)]
    assert len({root.key() for root in roots}) == len(roots), "each part has its own place"


def test_match_finds_the_longest_known_beginning() -> None:
    cache = PrefixCache()
    hashes = chain([1, 2, 3, 4, 5, 6])
    cache.commit(hashes[0], 7)
    cache.commit(hashes[2], 9)
    assert cache.match(hashes) == [7], "a gap ends the match"
    cache.commit(hashes[1], 8)
    assert cache.match(hashes) == [7, 8, 9]
    assert cache.match(chain([1, 2, 9, 9])) == [7]
    assert cache.match(chain([9, 9, 3, 4])) == []


def test_the_first_block_of_a_key_stays() -> None:
    cache = PrefixCache()
    (key, other) = chain([1, 2, 3, 4])
    cache.commit(key, 5)
    cache.commit(key, 6)
    cache.commit(other, 5)
    assert cache.match([key]) == [5]
    assert cache.match([other]) == []
    assert not cache.retain(6), "no request can find block 6, so it is free"


def test_the_least_recently_used_block_is_evicted_first() -> None:
    cache, names = filled(4)
    cache.revive(1)
    cache.retain(1)
    assert [cache.evict()[1] for _ in range(4)] == [0, 2, 3, 1]
    assert cache.num_idle == 0
    assert not any(map(cache.has, names))


def test_pinned_blocks_are_evicted_last_but_are_evicted() -> None:
    cache, names = filled(4)
    cache.pin([names[0], names[2]])
    assert cache.num_idle == 4, "a pin keeps no block from being taken"
    assert [cache.evict()[1] for _ in range(4)] == [1, 3, 0, 2]


def test_a_pin_counts_for_blocks_that_come_later() -> None:
    cache = PrefixCache()
    names = [root_hash(bytes([index])) for index in range(2)]
    cache.pin(names[:1])
    for block, key in enumerate(names):
        cache.commit(key, block)
        cache.retain(block)
    assert cache.evict()[1] == 1


def test_pins_of_two_sessions_add_up() -> None:
    cache, names = filled(2)
    cache.pin(names)
    cache.pin(names[:1])
    cache.unpin(names)
    cache.check_integrity([0, 0], [])
    assert cache.evict()[1] == 1
    cache.unpin(names[:1])
    assert not cache._pins
    cache.check_integrity([0, 0], [1])


def test_an_unpinned_block_is_the_most_recently_used() -> None:
    cache, names = filled(3)
    cache.pin(names[:1])
    cache.unpin(names[:1])
    assert [cache.evict()[1] for _ in range(3)] == [1, 2, 0]


def test_revived_blocks_are_not_evicted() -> None:
    cache, names = filled(3)
    cache.pin(names[1:2])
    cache.revive(0)
    cache.revive(1)
    cache.check_integrity([1, 1, 0], [])
    assert cache.evict()[1] == 2
    assert cache.num_idle == 0
    assert cache.match(names[:1]) == [0], "a held block is still found"


class TestIntegrity:
    """Each broken state is told apart from a sound one."""

    def test_an_idle_block_that_is_referenced(self) -> None:
        cache, _ = filled(2)
        with pytest.raises(AssertionError, match="idle block is referenced"):
            cache.check_integrity([0, 1], [])

    def test_a_cached_block_that_is_neither_held_nor_idle(self) -> None:
        cache, _ = filled(2)
        cache.revive(0)
        with pytest.raises(AssertionError, match="is not idle"):
            cache.check_integrity([0, 0], [])

    def test_a_cached_block_in_the_free_list(self) -> None:
        cache, _ = filled(2)
        with pytest.raises(AssertionError, match="in the free list"):
            cache.check_integrity([0, 0], [1])

    def test_a_key_of_a_forgotten_block(self) -> None:
        cache, names = filled(2)
        cache._block_of[names[0]] = 1
        with pytest.raises(AssertionError, match="disagree"):
            cache.check_integrity([0, 0], [])

    def test_a_pinned_block_among_the_unpinned(self) -> None:
        cache, names = filled(2)
        cache._pins[names[0]] += 1
        with pytest.raises(AssertionError, match="pins disagree"):
            cache.check_integrity([0, 0], [])


@pytest.mark.parametrize(
    ("longer", "rope_from", "shared"), [(12, None, 8), (12, 40, 8), (12, 8, 0), (10, 8, 8)], ids=str
)
def test_prompts_with_rotary_bases_of_their_own_share_with_those_of_equal_length(
    longer: int, rope_from: int | None, shared: int
) -> None:
    """The base of a prompt beyond the original context follows from its length."""
    driver = Driver(block_size=4, dynamic_rope_from=rope_from)
    for length in (10, longer):
        request = driver.submit([1] * length, 2)
        driver.drain()
    assert request.cached_tokens == shared


@pytest.mark.parametrize(("rope_from", "found"), [(None, 8), (40, 8), (10, 8), (9, 0), (4, 0)])
def test_what_a_session_pins_is_what_its_next_turn_finds(rope_from: int | None, found: int) -> None:
    """Also where a prompt has a rotary base of its own: then the next turn, which is longer, finds nothing."""
    driver = Driver(block_size=4, dynamic_rope_from=rope_from)
    driver.submit([1] * 8, 2)
    driver.drain()
    keys = driver.scheduler.sharing.keys_for_longer([1] * 9, PrefixRoot())
    request = driver.submit([1] * 10, 1)
    driver.drain()
    assert len(keys) * 4 == request.cached_tokens == found
