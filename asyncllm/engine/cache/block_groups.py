"""Block groups: which blocks a sequence keeps for layers with and without a sliding window.

A sequence has one block table in each group, all for the same positions. A group without a window keeps all blocks. A
group with a window keeps the blocks that an unread query may still see: its table loses blocks at the front as steps
are read and grows chunk by chunk, so a long prompt never holds more than a window and a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncllm.protocol import Limits

__all__ = ["BlockGroups", "BlockTable", "pool_tokens"]


class BlockTable:
    """A sequence's blocks in one group: `blocks[0]` holds the tokens from position `first` * block_size onwards."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int = 0, blocks: Sequence[int] = ()) -> None:
        self.first = first
        self.blocks = list(blocks)

    def __repr__(self) -> str:
        return f"{self.first}:{self.blocks}"

    @property
    def end(self) -> int:
        """Number of the block after the last one, counting from the sequence's first token."""
        return self.first + len(self.blocks)

    def between(self, first: int, end: int) -> list[int]:
        """Return blocks `first` to `end` - 1. The table has them all."""
        return self.blocks[max(0, first - self.first) : max(0, end - self.first)]


class BlockGroups:
    """The block groups of one model, and the rules that follow from their windows. Stateless. Blocks are numbered from
    the beginning of a sequence."""

    def __init__(self, limits: Limits, chunk: int) -> None:
        """`chunk`: maximum number of prompt tokens in a step."""
        self.count = len(limits.windows)
        self.block_size = limits.block_size
        self._windows = limits.windows
        self._chunk_blocks = -(-chunk // limits.block_size)
        self.windowed = [group for group, window in enumerate(limits.windows) if window is not None]
        self._whole = [group for group, window in enumerate(limits.windows) if window is None]

    def first_needed(self, group: int, position: int) -> int:
        """Return the first block that a token at `position` or later sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def cover(self, group: int, first: int, cached: int, known: int, *, alone: bool) -> int:
        """Return the end, in blocks, of the block table that a sequence gets at admission.

        `known`: its number of tokens. `cached`: how many of them are computed. `first`: the table's first block. With a
        window, the table covers the window and a chunk, whose blocks are reused for the rest of the prompt. A sequence
        that runs `alone` need not reserve blocks ahead of others, and gets the window only.
        """
        needed = -(-known // self.block_size)
        window = self._windows[group]
        if window is None:
            return needed
        reserved = blocks_in_window(window, self.block_size) + (0 if alone else self._chunk_blocks)
        return min(needed, max(cached // self.block_size + 1, first + reserved))

    def capacity(self, tables: Sequence[BlockTable]) -> int:
        """Return the number of tokens that fit in every block table."""
        return min(table.end for table in tables) * self.block_size

    def extend(
        self, tables: Sequence[BlockTable], end: int, max_blocks: int, allocate: Callable[[int], list[int]]
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Extend all tables to block `end`, or as far as `max_blocks` more blocks allow. Yield (group, number of the
        first new block, new blocks)."""
        lacking = [group for group, table in enumerate(tables) if table.end < end]
        for index, group in enumerate(lacking):
            table = tables[group]
            count = min(end - table.end, max_blocks // (len(lacking) - index))
            if count > 0:
                blocks, first = allocate(count), table.end
                table.blocks += blocks
                max_blocks -= count
                yield group, first, blocks

    def trim(self, tables: Sequence[BlockTable], num_read: int) -> list[int]:
        """Remove from the tables the blocks that no token from position `num_read` on sees, and return them."""
        unreached: list[int] = []
        for group in self.windowed:
            table = tables[group]
            count = self.first_needed(group, num_read) - table.first
            if count > 0:
                unreached += table.blocks[:count]
                del table.blocks[:count]
                table.first += count
        return unreached

    def key(self, group: int, key: bytes) -> bytes:
        """Return the prefix-cache key of a group's block, given its key in the hash chain."""
        return key + group.to_bytes(1, "little") if group else key

    def keys(self, group: int, chain: Sequence[bytes], num_tokens: int) -> list[bytes]:
        """Return the keys of a group's blocks that the token after the chain's first `num_tokens` sees."""
        return [self.key(group, key) for key in chain[self.first_needed(group, num_tokens) :]]

    def longest(self, chain: Sequence[bytes], start: int, has: Callable[[bytes], bool]) -> int:
        """Return the largest number of blocks of the chain, at least `start`, after which a sequence can continue.

        `has` tells which keys exist. Groups without a window need all blocks from `start` on; groups with a window need
        the blocks that the next token sees.
        """
        end = start
        if self._whole:
            while end < len(chain) and all(has(self.key(group, chain[end])) for group in self._whole):
                end += 1
        else:
            end = len(chain)
        longer = -1
        while longer != end:
            longer = end
            for group in self.windowed:
                end = self._longest_in_window(group, chain, start, end, has)
        return end

    def _longest_in_window(
        self, group: int, chain: Sequence[bytes], start: int, end: int, has: Callable[[bytes], bool]
    ) -> int:
        """Return the largest number of blocks, from `start` to `end`, after which the group's window is complete."""
        index = end - 1
        while index >= max(start, self.first_needed(group, end * self.block_size)):
            if not has(self.key(group, chain[index])):
                end = index
            index -= 1
        return end


def blocks_in_window(window: int, block_size: int) -> int:
    """Return the maximum number of blocks that one token's window can touch."""
    return -(-(window - 1) // block_size) + 1


def pool_tokens(limits: Limits, joint: int = 0) -> int:
    """Return the length of the longest sequence for which the pool always has enough blocks. `joint`: maximum number of
    tokens that have to be computed in one step."""
    num_whole = limits.windows.count(None)
    windows = [blocks_in_window(window + joint, limits.block_size) for window in limits.windows if window is not None]
    if not num_whole and sum(windows) <= limits.num_blocks:
        return max(limits.max_position, limits.num_blocks * limits.block_size)
    needed = (num_whole * end + sum(min(end, blocks) for blocks in windows) for end in range(1, limits.num_blocks + 2))
    return next(end for end, count in enumerate(needed) if count > limits.num_blocks) * limits.block_size
