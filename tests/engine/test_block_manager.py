"""Blocks: reference counts, the free list, the fence, and integrity checks that can fail."""

from __future__ import annotations

import pytest

from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.prefix_cache import PrefixCache, extend_hashes, root_hash


def keys(count: int, first: int = 0) -> list[bytes]:
    """A chain of `count` keys for blocks of one token."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(), range(first, first + count), 1)
    return hashes


def test_allocated_blocks_are_distinct_and_held() -> None:
    blocks = BlockManager(5, None)
    taken = blocks.allocate(3)
    assert len(set(taken)) == 3
    assert (blocks.num_free, blocks.num_held, blocks.num_available) == (2, 3, 2)
    blocks.check_integrity([taken])


def test_a_shared_block_comes_back_with_its_last_reference() -> None:
    blocks = BlockManager(3, None)
    table = blocks.allocate(2)
    blocks.share(table[:1])
    blocks.retire(table, 0, 0)
    assert blocks.num_free == 2
    blocks.check_integrity([table[:1]])
    blocks.retire(table[:1], 0, 0)
    assert blocks.num_free == 3
    blocks.check_integrity([])


@pytest.mark.parametrize("unread", [1, 2, 3])
def test_blocks_wait_for_the_last_step_that_may_write_them(unread: int) -> None:
    blocks = BlockManager(4, None)
    table = blocks.allocate(2)
    blocks.retire(table, last_step=7 + unread, last_read=7)
    for step in range(8, 7 + unread):
        blocks.step_read(step)
        assert (blocks.num_free, blocks.num_fenced) == (2, 2)
        blocks.check_integrity([])
    blocks.step_read(7 + unread)
    assert (blocks.num_free, blocks.num_fenced) == (4, 0)
    blocks.check_integrity([])


def test_a_fence_does_not_hold_up_blocks_of_earlier_steps() -> None:
    blocks = BlockManager(2, None)
    first, second = blocks.allocate(1), blocks.allocate(1)
    blocks.retire(first, 9, 7)
    blocks.retire(second, 8, 7)
    blocks.step_read(8)
    assert (blocks.num_free, blocks.num_fenced) == (1, 1)
    blocks.step_read(9)
    assert blocks.num_free == 2


def test_a_fenced_block_may_be_shared_meanwhile_and_then_stays() -> None:
    blocks = BlockManager(2, PrefixCache())
    table = blocks.allocate(1)
    blocks.retire(table, 5, 4)
    blocks.share(table)
    blocks.step_read(5)
    assert blocks.num_held == 1
    blocks.check_integrity([table])


def test_no_blocks_are_no_fence() -> None:
    blocks = BlockManager(2, None)
    blocks.retire([], 5, 4)
    assert blocks.num_fenced == 0
    assert not blocks._fenced


def test_known_blocks_become_idle_and_unknown_ones_free() -> None:
    cache = PrefixCache()
    blocks = BlockManager(4, cache)
    table = blocks.allocate(3)
    cache.commit(keys(1)[0], table[0])
    blocks.retire(table, 0, 0)
    assert (blocks.num_free, blocks.num_idle, blocks.num_available) == (3, 1, 4)
    assert blocks.is_idle(table[0])
    blocks.check_integrity([])


def test_free_blocks_go_before_idle_ones_and_the_tail_of_a_chain_before_its_root() -> None:
    cache = PrefixCache()
    blocks = BlockManager(4, cache)
    chain = keys(3)
    table = blocks.allocate(3)
    for key, block in zip(chain, table, strict=True):
        cache.commit(key, block)
    blocks.retire(table, 0, 0)
    blocks.allocate(1)
    assert cache.match(chain) == table, "a free block was there"
    assert blocks.allocate(1) == table[2:]
    assert cache.match(chain) == table[:2]
    assert blocks.allocate(2) == [table[0], table[1]]
    assert not any(map(cache.has, chain))


def test_sharing_an_idle_block_revives_it() -> None:
    cache = PrefixCache()
    blocks = BlockManager(2, cache)
    table = blocks.allocate(1)
    cache.commit(keys(1)[0], table[0])
    blocks.retire(table, 0, 0)
    assert blocks.is_idle(table[0])
    blocks.share(table)
    assert not blocks.is_idle(table[0])
    assert (blocks.num_idle, blocks.num_held) == (0, 1)
    blocks.check_integrity([table])


class TestIntegrity:
    """The checks of the checks: each broken state is told apart from a sound one."""

    def sound(self) -> tuple[BlockManager, list[int]]:
        cache = PrefixCache()
        blocks = BlockManager(6, cache)
        table, gone = blocks.allocate(3), blocks.allocate(1)
        cache.commit(keys(1)[0], gone[0])
        blocks.retire(gone, 0, 0)
        blocks.check_integrity([table])
        return blocks, table

    def test_a_leaked_reference(self) -> None:
        blocks, table = self.sound()
        with pytest.raises(AssertionError, match="counts 1 references, 0 are held"):
            blocks.check_integrity([table[1:]])

    def test_a_reference_too_few(self) -> None:
        blocks, table = self.sound()
        with pytest.raises(AssertionError, match="counts 1 references, 2 are held"):
            blocks.check_integrity([table, table[:1]])

    def test_a_block_freed_twice(self) -> None:
        blocks, table = self.sound()
        blocks._free.append(blocks._free[0])
        with pytest.raises(AssertionError, match="twice in the free list"):
            blocks.check_integrity([table])

    def test_a_held_block_in_the_free_list(self) -> None:
        blocks, table = self.sound()
        blocks._free.append(table[0])
        with pytest.raises(AssertionError, match="free block is referenced"):
            blocks.check_integrity([table])

    def test_a_lost_block(self) -> None:
        blocks, table = self.sound()
        blocks._free.pop()
        with pytest.raises(AssertionError, match="are not 6"):
            blocks.check_integrity([table])

    def test_a_cached_block_in_the_free_list(self) -> None:
        blocks, table = self.sound()
        cache = blocks.prefix_cache
        assert cache is not None
        blocks._free[0] = next(iter(cache._idle))
        with pytest.raises(AssertionError, match="in the free list"):
            blocks.check_integrity([table])
