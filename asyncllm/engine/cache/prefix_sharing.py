"""PrefixSharing: finds cached blocks for the beginning of a sequence, and offers the sequence's own blocks to
others."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.engine.cache.prefix_cache import PrefixCache, PrefixRoot, extend_hashes
from asyncllm.engine.schedule.sequence import Request, Sequence, SequenceState
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Limits

__all__ = ["Found", "PrefixSharing"]


class Found(NamedTuple):
    """Blocks that already hold the beginning of a sequence."""

    end: int
    """Number of blocks found; all tables end there."""
    tables: Items[BlockTable]
    """By group, at least the blocks that the next token sees. Read only: they may belong to a sibling."""
    sources: list[int] | None = None
    """By group, the block to copy the next block from. It holds all known tokens except the last."""


class PrefixSharing:
    """Looks in the prefix cache and at siblings. Does not count references. Called by the scheduler only."""

    def __init__(self, cache: PrefixCache | None, groups: BlockGroups, limits: Limits) -> None:
        """`cache`: None if only siblings share their prompt."""
        self._cache = cache
        self._groups = groups
        self._block_size = limits.block_size
        self._keeps_state = limits.keeps_state
        """Whether the state in a sibling's last block changes with the sibling's own tokens, so that it cannot be
        shared."""
        self._dynamic_rope_from = limits.dynamic_rope_from
        """The rotary base of longer prompts depends on their length, so their keys differ from those of other
        prompts."""

    def hash_prompt(self, request: Request) -> None:
        """Hash the full blocks of the prompt, once for all sequences of the request."""
        if self._cache is not None:
            images = request.images
            extend_hashes(request.block_hashes, self._root(request).key(), request.prompt_ids, self._block_size, images)

    def find(self, sequence: Sequence) -> Found:
        """Return the blocks that already hold the beginning of a sequence's known tokens.

        The last known token is never among them, because its logits have to be computed.
        """
        last_block, offset = divmod(len(sequence.token_ids) - 1, self._block_size)
        if sequence.index > 0 and sequence.num_generated == 0:
            for sibling in sequence.request.sequences:
                # Copies run before the writes of their step, so the sibling's prompt must be complete: in DECODE it is.
                if sibling.state is SequenceState.DECODE:
                    found = self._of_sibling(sibling, last_block, offset)
                    if found is not None:
                        return found
        if self._cache is None or not sequence.request.reuses_prefix:
            return Found(0, [BlockTable() for _ in range(self._groups.count)])
        self._hash_blocks(sequence)
        end = self._groups.longest(sequence.hashes[:last_block], 0, self._cache.has)
        chain, tables = sequence.hashes[:end], []
        for group in range(self._groups.count):
            blocks = self._cache.match(self._groups.keys(group, chain, end * self._block_size))
            tables.append(BlockTable(end - len(blocks), blocks))
        return Found(end, tables)

    def _of_sibling(self, sibling: Sequence, last_block: int, offset: int) -> Found | None:
        """Return a sibling's full blocks of the prompt, and its partial block to copy unless that holds a state. None
        if the sibling no longer has everything that is needed."""
        copies = offset > 0 and not self._keeps_state
        position = last_block * self._block_size + (offset if copies else 0)
        tables = sibling.tables
        if any(table.first > self._groups.first_needed(group, position) for group, table in enumerate(tables)):
            return None
        if not copies:
            return Found(last_block, tables)
        return Found(last_block, tables, [table.between(last_block, last_block + 1)[0] for table in sibling.tables])

    def offer(self, sequence: Sequence, num_written: int | None = None) -> None:
        """Put a sequence's full blocks into the prefix cache: those of its first `num_written` tokens, or of all but
        the newest. The steps that wrote them have been read."""
        if self._cache is None or not sequence.tables:
            return
        written = len(sequence.token_ids) - 1 if num_written is None else num_written
        full = min(written, sequence.capacity) // self._block_size
        if full <= sequence.committed:
            return
        self._hash_blocks(sequence)
        for group, table in enumerate(sequence.tables):
            for index in range(max(sequence.committed, table.first), full):
                key = self._groups.key(group, sequence.hashes[index])
                self._cache.commit(key, table.blocks[index - table.first])
        sequence.committed = full

    def _hash_blocks(self, sequence: Sequence) -> None:
        """Hash the full blocks of a sequence's known tokens."""
        request = sequence.request
        extend_hashes(sequence.hashes, self._root(request).key(), sequence.token_ids, self._block_size, request.images)

    def keys_for_longer(self, token_ids: list[int], root: PrefixRoot, images: Items[PromptImage] = ()) -> list[bytes]:
        """Return the keys of the full blocks that a longer prompt with this beginning can find in the cache. `root`:
        the root of its hash chain, without the part that depends on the length."""
        chain: list[bytes] = []
        # Beyond the original context, a longer prompt has a different rotary base and shares nothing.
        if self._cache is not None and not self._has_own_base(len(token_ids) + 1):
            extend_hashes(chain, root.key(), token_ids, self._block_size, images)
        end = len(chain) * self._block_size
        return [key for group in range(self._groups.count) for key in self._groups.keys(group, chain, end)]

    def _root(self, request: Request) -> PrefixRoot:
        prompt_len = len(request.prompt_ids)
        return request.prefix_root._replace(rope_len=prompt_len if self._has_own_base(prompt_len) else None)

    def _has_own_base(self, prompt_len: int) -> bool:
        """Return whether a prompt of this length has a rotary base that depends on the length."""
        return self._dynamic_rope_from is not None and prompt_len > self._dynamic_rope_from
