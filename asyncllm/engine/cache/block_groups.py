"""Block groups: what a sequence keeps of its tokens, which layers with a sliding window need for a while only.

A sequence has a block table in each group, all over the same positions. A group without a window keeps all blocks. One
with a window keeps those that some query still to be read may see: its table loses blocks at the front as steps are
read, and gets them chunk by chunk, so that a long prompt never has more than the window and a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncllm.protocol import Limits

__all__ = ["BlockGroups", "BlockTable", "pool_tokens"]


class BlockTable:
    """A sequence's blocks in one group: the block of its tokens number `first` * block_size on, and those after it."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int = 0, blocks: Sequence[int] = ()) -> None:
        self.first = first
        self.blocks = list(blocks)

    def __repr__(self) -> str:
        return f"{self.first}:{self.blocks}"

    @property
    def end(self) -> int:
        """How many blocks there are from the sequence's first token on, whether it still has them or not."""
        return self.first + len(self.blocks)

    def between(self, first: int, end: int) -> list[int]:
        """Return the blocks number `first` to `end` - 1, of which it has all."""
        return self.blocks[max(0, first - self.first) : max(0, end - self.first)]


class BlockGroups:
    """The groups of one model, and what follows from their windows. Has no state; counts blocks by their number in a
    sequence."""

    def __init__(self, limits: Limits, chunk: int) -> None:
        """`chunk`: most tokens of a prompt that a step computes."""
        self.count = len(limits.windows)
        self.block_size = limits.block_size
        self._windows = limits.windows
        self._chunk_blocks = -(-chunk // limits.block_size)
        self.windowed = [group for group, window in enumerate(limits.windows) if window is not None]
        self._whole = [group for group, window in enumerate(limits.windows) if window is None]

    def first_needed(self, group: int, position: int) -> int:
        """Return the first block that a token at `position`, or a later one, sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def cover(self, group: int, first: int, cached: int, known: int, *, alone: bool) -> int:
        """Return up to which block a sequence of `known` tokens has its own when it is admitted, of which `cached` are
        computed, and whose table begins at `first`.

        With a window it gets as many as the window and a chunk take, which are enough for the whole prompt then. What
        runs `alone` waits for no one to give up blocks, and takes no more than the window at first.
        """
        needed = -(-known // self.block_size)
        window = self._windows[group]
        if window is None:
            return needed
        most = blocks_in_window(window, self.block_size) + (0 if alone else self._chunk_blocks)
        return min(needed, max(cached // self.block_size + 1, first + most))

    def capacity(self, tables: Sequence[BlockTable]) -> int:
        """Return how many tokens have room in all groups."""
        return min(table.end for table in tables) * self.block_size

    def extend(
        self, tables: Sequence[BlockTable], end: int, most: int, allocate: Callable[[int], list[int]]
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Let all tables end at block `end`, or as close to it as up to `most` more blocks allow. Yield group, number
        of the first block, and blocks."""
        lacking = [group for group, table in enumerate(tables) if table.end < end]
        for index, group in enumerate(lacking):
            table = tables[group]
            count = min(end - table.end, most // (len(lacking) - index))
            if count > 0:
                blocks, first = allocate(count), table.end
                table.blocks += blocks
                most -= count
                yield group, first, blocks

    def trim(self, tables: Sequence[BlockTable], num_read: int) -> list[int]:
        """Take blocks out of the tables that no token from position `num_read` on sees, and return them."""
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
        """Return what the prefix cache calls a group's block, of which `key` is the place in the prefix chain."""
        return key + group.to_bytes(1, "little") if group else key

    def keys(self, group: int, chain: Sequence[bytes], num_tokens: int) -> list[bytes]:
        """Return the keys of a group's blocks in the chain that a token after the first `num_tokens` sees."""
        return [self.key(group, key) for key in chain[self.first_needed(group, num_tokens) :]]

    def longest(self, chain: Sequence[bytes], start: int, has: Callable[[bytes], bool]) -> int:
        """Return up to which block of the chain there is, from `start` on, all that a sequence needs to go on there.

        That is every block without a window, and with one those that the next token sees.
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
        """Return the last number of blocks, up to `end`, of which the group has those in its window."""
        index = end - 1
        while index >= max(start, self.first_needed(group, end * self.block_size)):
            if not has(self.key(group, chain[index])):
                end = index
            index -= 1
        return end


def blocks_in_window(window: int, block_size: int) -> int:
    """Return how many blocks the positions that one token sees may lie in."""
    return -(-(window - 1) // block_size) + 1


def pool_tokens(limits: Limits, joint: int = 0) -> int:
    """Return how many tokens the longest sequence may have, so that the pool holds all that it needs at one time.
    `joint`: most tokens that have to be computed in one step."""
    num_whole = limits.windows.count(None)
    most = [blocks_in_window(window + joint, limits.block_size) for window in limits.windows if window is not None]
    if not num_whole and sum(most) <= limits.num_blocks:
        return max(limits.max_position, limits.num_blocks * limits.block_size)
    needed = (num_whole * end + sum(min(end, blocks) for blocks in most) for end in range(1, limits.num_blocks + 2))
    return next(end for end, count in enumerate(needed) if count > limits.num_blocks) * limits.block_size
