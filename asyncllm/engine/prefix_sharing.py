"""Prefix sharing: the blocks that a sequence begins with and that are written already, and those it offers others."""

from __future__ import annotations

import struct

from asyncllm.batch import Limits
from asyncllm.engine.prefix_cache import PrefixCache, extend_hashes, root_hash
from asyncllm.engine.sequence import Request, Sequence, SequenceState

__all__ = ["PrefixSharing"]


class PrefixSharing:
    """Looks into the prefix cache and at siblings. Takes and gives no references; only the scheduler calls it."""

    def __init__(self, cache: PrefixCache | None, limits: Limits) -> None:
        """Without a cache, siblings share their prompt all the same."""
        self._cache = cache
        self._block_size = limits.block_size
        self._dynamic_rope_from = limits.dynamic_rope_from
        """Prompts longer than this have a rotary base of their own, so that their K differ from others'."""

    def hash_prompt(self, request: Request) -> None:
        """Name the full blocks of the prompt, once for all of its sequences."""
        if self._cache is not None:
            extend_hashes(request.block_hashes, self._root(request), request.prompt_ids, self._block_size)

    def find(self, sequence: Sequence) -> tuple[list[int], int | None]:
        """Blocks with the beginning of the sequence's known tokens, and a block to copy the next one from.

        At least the last known token is always computed, as its logits are needed.
        """
        last_block, offset = divmod(len(sequence.token_ids) - 1, self._block_size)
        if sequence.index > 0 and sequence.num_generated == 0:
            for sibling in sequence.request.sequences:
                # Copies come before the writes of their step. Who is computed again in this one is not in DECODE yet.
                if sibling.state is SequenceState.DECODE:
                    return sibling.blocks[:last_block], sibling.blocks[last_block] if offset else None
        if self._cache is None or not sequence.request.reuses_prefix:
            return [], None
        extend_hashes(sequence.hashes, self._root(sequence.request), sequence.token_ids, self._block_size)
        return self._cache.match(sequence.hashes[:last_block]), None

    def offer(self, sequence: Sequence, num_written: int | None = None) -> None:
        """Let others find the sequence's full blocks, written by steps that have been read: those of so many tokens, or
        of all but the newest."""
        if self._cache is None or not sequence.blocks:
            return
        written = len(sequence.token_ids) - 1 if num_written is None else num_written
        full = min(written // self._block_size, len(sequence.blocks))
        if full <= sequence.committed:
            return
        extend_hashes(sequence.hashes, self._root(sequence.request), sequence.token_ids, self._block_size)
        for index in range(sequence.committed, full):
            self._cache.commit(sequence.hashes[index], sequence.blocks[index])
        sequence.committed = full

    def _root(self, request: Request) -> bytes:
        prompt_len, cache_salt = len(request.prompt_ids), request.terms.cache_salt
        if self._dynamic_rope_from is not None and prompt_len > self._dynamic_rope_from:
            return root_hash(b"rope", struct.pack("<q", prompt_len), cache_salt=cache_salt)
        return root_hash(cache_salt=cache_salt)
