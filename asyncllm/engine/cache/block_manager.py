"""BlockManager: which KV blocks are free, and how many sequences refer to each block.

A block is in one of three states:

        free    no sequence refers to it, and it has no content             (`_free`)
        idle    no sequence refers to it; the prefix cache knows its content (`PrefixCache`)
        held    one or more sequences refer to it                           (`_references` > 0)

`allocate` takes free blocks first, then evicts idle ones. `retire` returns blocks under the *fence rule*: a reference
ends only when the newest step that may write the block has been read. Aborting, finishing and preempting all use this
path.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from asyncllm.engine.cache.prefix_cache import PrefixCache

__all__ = ["BlockManager"]


class BlockManager:
    """Reference counts of `num_blocks` blocks, the free list and the fence. Only the scheduler calls it."""

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache | None) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._fenced: deque[tuple[int, list[int]]] = deque()
        """(newest writing step, blocks), in the order of `retire`."""
        self.num_fenced = 0
        """References that will end when steps in flight have been read."""
        self.on_evict: Callable[[bytes, int], None] | None = None
        """Called with the key and the number of an idle block that is being evicted, before it is written."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return self.prefix_cache.num_idle if self.prefix_cache is not None else 0

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return now."""
        return len(self._free) + self.num_idle

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def is_idle(self, block: int) -> bool:
        """Return whether no sequence refers to this cached block, so that sharing it makes fewer available."""
        return self._references[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. The caller has checked `num_available`."""
        while len(self._free) < count:
            assert self.prefix_cache is not None
            key, block = self.prefix_cache.evict()
            self._free.append(block)
            if self.on_evict is not None:
                self.on_evict(key, block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these held or idle blocks."""
        for block in blocks:
            if self._references[block] == 0:
                assert self.prefix_cache is not None
                self.prefix_cache.revive(block)
            self._references[block] += 1

    def retire(self, blocks: list[int], last_step: int, last_read: int) -> None:
        """End a reference to each block: now if step `last_step` has been read, else when it is."""
        if not blocks:
            return
        if last_step <= last_read:
            self._release(blocks)
        else:
            self._fenced.append((last_step, blocks))
            self.num_fenced += len(blocks)

    def step_read(self, step: int) -> None:
        """Note that all steps up to `step` have been read, and release the blocks that waited for them."""
        if not self._fenced:
            return
        waiting: deque[tuple[int, list[int]]] = deque()
        for last_step, blocks in self._fenced:
            if last_step <= step:
                self.num_fenced -= len(blocks)
                self._release(blocks)
            else:
                waiting.append((last_step, blocks))
        self._fenced = waiting

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache: their content does not match their keys."""
        for block in blocks:
            if self.prefix_cache is not None and self.prefix_cache.forget(block):
                self._free.append(block)

    def clear(self) -> None:
        """Empty the prefix cache. Held blocks stay held."""
        if self.prefix_cache is not None:
            self._free.extend(self.prefix_cache.clear())

    def _release(self, blocks: list[int]) -> None:
        # Deepest block first, so that the LRU order evicts the tail of a chain before its root.
        for block in reversed(blocks):
            references = self._references[block] = self._references[block] - 1
            if references == 0 and (self.prefix_cache is None or not self.prefix_cache.retain(block)):
                self._free.append(block)

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the counts agree with the block tables of all live sequences."""
        expected: Counter[int] = Counter()
        for table in block_tables:
            expected.update(table)
        for _, blocks in self._fenced:
            expected.update(blocks)
        for block, references in enumerate(self._references):
            assert references == expected[block], (
                f"block {block} counts {references} references, {expected[block]} are held"
            )
        assert len(set(self._free)) == len(self._free), "a block is twice in the free list"
        assert all(self._references[block] == 0 for block in self._free), "a free block is referenced"
        held = sum(1 for references in self._references if references)
        assert held + len(self._free) + self.num_idle == self.num_blocks, (
            f"{held} held + {len(self._free)} free + {self.num_idle} idle blocks are not {self.num_blocks}"
        )
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self._references, self._free)
