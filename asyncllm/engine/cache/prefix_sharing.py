"""Prefix sharing: the blocks that a sequence begins with and that are written already, and those it offers others."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.engine.cache.prefix_cache import PrefixCache, PrefixRoot, extend_hashes
from asyncllm.engine.schedule.sequence import Request, Sequence, SequenceState
from asyncllm.protocol import Limits, PromptImage

__all__ = ["Found", "PrefixSharing"]


class Found(NamedTuple):
    """What there is of a sequence's beginning."""

    end: int
    """Blocks of it that are written: the tables end there."""
    tables: Items[BlockTable]
    """By group, at least what a token after them sees. Only to be read: they may be a sibling's own."""
    sources: list[int] | None = None
    """By group, a block to copy the next one from, in which all known tokens but the last are written."""


class PrefixSharing:
    """Looks into the prefix cache and at siblings. Takes and gives no references; only the scheduler calls it."""

    def __init__(self, cache: PrefixCache | None, groups: BlockGroups, limits: Limits) -> None:
        """Without a cache, siblings share their prompt all the same."""
        self._cache = cache
        self._groups = groups
        self._block_size = limits.block_size
        self._keeps_state = limits.keeps_state
        """Whether a sibling's last block is of no use to others, as its state goes on with the sibling's own tokens."""
        self._dynamic_rope_from = limits.dynamic_rope_from
        """Prompts longer than this have a rotary base of their own, so that their K differ from others'."""

    def hash_prompt(self, request: Request) -> None:
        """Name the full blocks of the prompt, once for all of its sequences."""
        if self._cache is not None:
            images = request.images
            extend_hashes(request.block_hashes, self._root(request).key(), request.prompt_ids, self._block_size, images)

    def find(self, sequence: Sequence) -> Found:
        """Return the blocks with the beginning of the sequence's known tokens.

        At least the last known token is always computed, as its logits are needed.
        """
        last_block, offset = divmod(len(sequence.token_ids) - 1, self._block_size)
        if sequence.index > 0 and sequence.num_generated == 0:
            for sibling in sequence.request.sequences:
                # Copies come before the writes of their step. Who is computed again in this one is not in DECODE yet.
                if sibling.state is SequenceState.DECODE:
                    found = self._of_sibling(sibling, last_block, offset)
                    if found is not None:
                        return found
        if self._cache is None or not sequence.request.reuses_prefix:
            return Found(0, [BlockTable() for _ in range(self._groups.count)])
        self._name_blocks(sequence)
        end = self._groups.longest(sequence.hashes[:last_block], 0, self._cache.has)
        chain, tables = sequence.hashes[:end], []
        for group in range(self._groups.count):
            blocks = self._cache.match(self._groups.keys(group, chain, end * self._block_size))
            tables.append(BlockTable(end - len(blocks), blocks))
        return Found(end, tables)

    def _of_sibling(self, sibling: Sequence, last_block: int, offset: int) -> Found | None:
        """Return what a sibling still has of the prompt, if that is enough: the full blocks, of one that is not full a
        copy, unless it holds a state."""
        copies = offset > 0 and not self._keeps_state
        position = last_block * self._block_size + (offset if copies else 0)
        tables = sibling.tables
        if any(table.first > self._groups.first_needed(group, position) for group, table in enumerate(tables)):
            return None
        if not copies:
            return Found(last_block, tables)
        return Found(last_block, tables, [table.between(last_block, last_block + 1)[0] for table in sibling.tables])

    def offer(self, sequence: Sequence, num_written: int | None = None) -> None:
        """Let others find the sequence's full blocks, written by steps that have been read: those of so many tokens, or
        of all but the newest."""
        if self._cache is None or not sequence.tables:
            return
        written = len(sequence.token_ids) - 1 if num_written is None else num_written
        full = min(written, sequence.capacity) // self._block_size
        if full <= sequence.committed:
            return
        self._name_blocks(sequence)
        for group, table in enumerate(sequence.tables):
            for index in range(max(sequence.committed, table.first), full):
                key = self._groups.key(group, sequence.hashes[index])
                self._cache.commit(key, table.blocks[index - table.first])
        sequence.committed = full

    def _name_blocks(self, sequence: Sequence) -> None:
        """Name the full blocks of a sequence's known tokens."""
        request = sequence.request
        extend_hashes(sequence.hashes, self._root(request).key(), sequence.token_ids, self._block_size, request.images)

    def keys_for_longer(self, token_ids: list[int], root: PrefixRoot, images: Items[PromptImage] = ()) -> list[bytes]:
        """Keys of the full blocks that a longer prompt which begins with these tokens can find in the cache. `root`:
        that of both, but for what follows from their lengths."""
        chain: list[bytes] = []
        # Beyond the original context a longer prompt has another rotary base, and shares nothing.
        if self._cache is not None and not self._has_own_base(len(token_ids) + 1):
            extend_hashes(chain, root.key(), token_ids, self._block_size, images)
        end = len(chain) * self._block_size
        return [key for group in range(self._groups.count) for key in self._groups.keys(group, chain, end)]

    def _root(self, request: Request) -> PrefixRoot:
        prompt_len = len(request.prompt_ids)
        return request.prefix_root._replace(rope_len=prompt_len if self._has_own_base(prompt_len) else None)

    def _has_own_base(self, prompt_len: int) -> bool:
        """Return whether a prompt of this length has a rotary base that follows from the length."""
        return self._dynamic_rope_from is not None and prompt_len > self._dynamic_rope_from
