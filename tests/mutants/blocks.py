"""Faults in what decides in which blocks keys and values are kept, on the device and the host."""

from __future__ import annotations

from tests.mutants.mutant import mutants

__all__ = ["BLOCKS"]

PREFIX_SHARING = mutants(
    "engine/cache/prefix_sharing.py",
    (
        "                if sibling.state is SequenceState.DECODE:",
        "                if sibling.slot >= 0:",
        "a block is copied in the step that writes it",
    ),
    (
        "        if any(table.first > self._groups",
        "        if False and any(table.first > self._groups",
        "a sibling shares blocks that it has given back",
    ),
    (
        "if self._cache is None or not sequence.request.reuses_prefix:",
        "if self._cache is None:",
        "scored prompts skip the positions that are cached",
    ),
    (
        "self._groups.longest(sequence.hashes[:last_block], 0, self._cache.has)",
        "self._groups.longest(sequence.hashes, 0, self._cache.has)",
        "a prompt that is cached whole leaves no token to compute",
    ),
    (
        "return self._dynamic_rope_from is not None and prompt_len > self._dynamic_rope_from",
        "return False",
        "prompts with rotary bases of their own share blocks",
    ),
    (
        "written = len(sequence.token_ids) - 1 if num_written is None",
        "written = len(sequence.token_ids) if num_written is None",
        "a block is shared before its last token is written",
        "with more than one token a block, the caller's condition hides it; with one, the writing step is on its way",
    ),
)

HOST_BLOCKS = mutants(
    "engine/cache/host_blocks.py",
    (
        "        if sequence.request.output_logits:",
        "        if False:",
        "logits of chunks in flight are lost by a swap",
    ),
    (
        "if self.blocks.num_available - num_idle < num_own:",
        "if self.blocks.num_available < num_own:",
        "host blocks that are shared count as room as well",
    ),
    ("            self.num_fallbacks += 1", "            pass", "swaps that found no room are not counted"),
    (
        "        _copy_keys(pairs, self._device.prefix_cache, self._cache)",
        "        pass",
        "swapped siblings do not share their prompt on the host",
    ),
    (
        "            kept.blocks += allocated",
        "            kept.blocks = allocated + kept.blocks",
        "swapped blocks come back in another order",
    ),
    (
        "return self._step if self.plan else self._step - 1",
        "return self._step",
        "host blocks wait for a step that copies nothing, and may never come",
    ),
    (
        "        sequence.host_step = self._last_copying_step",
        "        sequence.host_step = -1",
        "host blocks come back before the copy to them has run",
    ),
    (
        "BlockTable(max(num_found, table.first), table.between(num_found, table.end))",
        "BlockTable(max(num_found, table.first), table.blocks)",
        "blocks are copied up to the places of others",
    ),
    (
        "for key in sequence.hashes[first:end])",
        "for key in sequence.hashes[:end])",
        "the beginning of a prompt is copied up to its middle",
    ),
    (
        "if (end - num_found) * self._block_size < self._min_copied_tokens:",
        "if False:",
        "copies are made that take longer than computing",
    ),
    (
        "        _copy_keys(pairs, self._cache, self._device.prefix_cache)",
        "        pass",
        "blocks that came up are not found on the device",
    ),
    (
        "self.blocks.retire(list(stored), self._last_copying_step, self._last_read)",
        "self.blocks.retire(list(stored), -1, self._last_read)",
        "a host block is given away before it was copied up",
    ),
    (
        "self.blocks.retire(sequence.host_blocks, sequence.host_step, self._last_read)",
        "self.blocks.retire(sequence.host_blocks, -1, self._last_read)",
        "a cancelled sequence's host blocks skip the fence",
    ),
    ("            self.blocks.share(kept)", "            pass", "a cached host block is given back that nobody took"),
    ("        elif self.blocks.num_available:", "        else:", "a full host breaks evictions on the device"),
    (
        "self.blocks.retire(kept, self._last_copying_step, self._last_read)",
        "self.blocks.retire(kept, -1, self._last_read)",
        "two evicted blocks are copied to the same place",
    ),
)

BLOCK_MANAGER = mutants(
    "engine/cache/block_manager.py",
    (
        "return len(self._free) + self.num_idle",
        "return len(self._free)",
        "cached blocks are never given to anybody else",
    ),
    ("            if self.on_evict is not None:", "            if False:", "the host keeps nothing that was evicted"),
    (
        "            if self._references[block] == 0:\n                assert",
        "            if False:\n                assert",
        "a shared block may be evicted",
    ),
    (
        "        if last_step <= last_read:",
        "        if last_step < last_read:",
        "blocks wait for a step that has been read",
    ),
    (
        "        if last_step <= last_read:",
        "        if last_step <= last_read + 1:",
        "blocks come back one step too early",
    ),
    ("            if last_step <= step:", "            if last_step < step:", "blocks come back one step too late"),
    (
        "                self.num_fenced -= len(blocks)",
        "                pass",
        "blocks stay on their way back for ever",
    ),
    (
        "        for block in reversed(blocks):",
        "        for block in blocks:",
        "the root of a chain is evicted before its tail",
    ),
    (
        "if references == 0 and (self.prefix_cache is None or not self.prefix_cache.retain(block)):",
        "if self.prefix_cache is None or not self.prefix_cache.retain(block):",
        "a block is free while another row reads it",
    ),
    ("not self.prefix_cache.retain(block)", "True", "a cached block is free as well"),
)

PREFIX_CACHE = mutants(
    "engine/cache/prefix_cache.py",
    (
        '        digest.update(len(part).to_bytes(8, "little"))\n',
        "",
        "chains with different roots may have equal keys",
    ),
    ("parent = hashes[-1] if hashes else root", "parent = root", "a chain that grows has other keys than one at once"),
    (
        "hashlib.sha256(parent + array(",
        "hashlib.sha256(array(",
        "equal blocks match after different beginnings",
    ),
    ("                break", "                continue", "a match goes on behind a block that is not there"),
    (
        "if key not in self._block_of and block not in self._key_of:",
        "if block not in self._key_of:",
        "two blocks have the same key",
    ),
    ("        if key in self._pins:", "        if False:", "blocks that a session pinned are evicted as others are"),
    (
        "block, _ = (self._idle or self._idle_pinned).popitem(last=False)",
        "block, _ = (self._idle or self._idle_pinned).popitem(last=True)",
        "what was used last is evicted first",
    ),
    (
        "block, _ = (self._idle or self._idle_pinned).popitem(last=False)",
        "block, _ = (self._idle_pinned or self._idle).popitem(last=False)",
        "what a session pinned is evicted first",
    ),
    (
        "        del self._block_of[key]\n        return key, block",
        "        return key, block",
        "an evicted block is still found",
    ),
    ("            if self._pins[key] <= 0:", "            if True:", "one session unpins what another has pinned"),
    (
        "            if block is not None and block in self._idle:",
        "            if False:",
        "pinning idle blocks does not keep them",
    ),
)

BLOCK_GROUPS = mutants(
    "engine/cache/block_groups.py",
    (
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window + 2) // self.block_size",
        "a block comes back while one token of it is in the window",
    ),
    (
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window) // self.block_size",
        "a block is held a token longer than the window reaches",
    ),
    (
        "return -(-(window - 1) // block_size) + 1",
        "return -(-(window - 1) // block_size)",
        "the longest sequence does not find the blocks of its window",
    ),
    (
        'return key + group.to_bytes(1, "little") if group else key',
        "return key",
        "a group finds another group's blocks",
    ),
    ("            table.first += count\n", "", "the blocks of a window count from the sequence's first token"),
    (
        "            while end < len(chain) and all(",
        "            while end < len(chain) and any(",
        "a beginning is found that one group has not whole",
    ),
    ("                end = index\n", "                pass\n", "a beginning is found whose window is not there"),
    (
        "        while longer != end:\n            longer = end\n",
        "        if longer != end:\n",
        "a beginning is found that only the last window has",
    ),
    (
        "(0 if alone else self._chunk_blocks)",
        "self._chunk_blocks",
        "a pool that holds a window and no chunk admits nothing",
    ),
)

BLOCKS = BLOCK_GROUPS + PREFIX_SHARING + HOST_BLOCKS + BLOCK_MANAGER + PREFIX_CACHE
