"""PrefixCache: maps prefixes to the full blocks that hold their keys and values.

A block's key is the SHA-256 of its parent's key and its token ids, so it stands for the whole prefix up to the block's
end, and matching is a series of dictionary look-ups. Blocks to which no sequence refers stay *idle* until they are
evicted: least recently used first, those pinned by a session last.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncllm.prompt_image import PromptImage

__all__ = ["PrefixCache", "PrefixRoot", "extend_hashes", "root_hash"]


class PrefixRoot(NamedTuple):
    """The root of a hash chain: everything besides tokens that keys and values depend on, and the salt that keeps the
    requests of different tenants apart."""

    cache_salt: str | None = None
    rope_len: int | None = None
    """The prompt's length, if the rotary base depends on it."""
    adapter: int | None = None
    """The number of the request's LoRA adapter."""

    def key(self) -> bytes:
        """Return the parent key of a chain's first block."""
        return root_hash(*(b"" if part is None else b"=" + str(part).encode("utf-8", "surrogatepass") for part in self))


def root_hash(*parts: bytes) -> bytes:
    """Return the hash of these parts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    images: Sequence[PromptImage] = (),
) -> None:
    """Append the keys of the full blocks of `token_ids` to `hashes`, which holds the first of them.

    All images have the same token ids, so the key of a block that an image reaches into includes the image's digest and
    position.
    """
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        named = hashlib.sha256(parent + array("q", token_ids[start : start + block_size]).tobytes())
        for image in images:
            if image.position < start + block_size and start < image.end:
                named.update((image.position - start).to_bytes(8, "little", signed=True) + image.digest)
        parent = named.digest()
        hashes.append(parent)


class PrefixCache:
    """Maps keys to blocks and back, and keeps idle blocks in least-recently-used order."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_pinned: OrderedDict[int, None] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        """Key -> number of sessions that have pinned it. Pinned blocks are evicted last, but not exempt from
        eviction."""

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._idle_pinned)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of these keys, up to the first key that has none."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, key: bytes) -> bool:
        """Return whether a block has this key."""
        return key in self._block_of

    def key_of(self, block: int) -> bytes | None:
        """Return the block's key, or None."""
        return self._key_of.get(block)

    def commit(self, key: bytes, block: int) -> None:
        """Record that `block` holds the prefix of `key`, once the step that wrote it has been read. A key keeps its
        first block."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def retain(self, block: int) -> bool:
        """Make an unreferenced block idle if it has a key. Return whether it has one."""
        key = self._key_of.get(block)
        if key is None:
            return False
        if key in self._pins:
            self._idle_pinned[block] = None
        else:
            self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Note that an idle block is referenced again."""
        if block in self._idle:
            del self._idle[block]
        else:
            del self._idle_pinned[block]

    def evict(self) -> tuple[bytes, int]:
        """Evict the least recently used idle block. Return its key and the block."""
        block, _ = (self._idle or self._idle_pinned).popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key, block

    def forget(self, block: int) -> bool:
        """Forget the block's key. Return whether the block was idle and is now free."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        for idle in (self._idle, self._idle_pinned):
            if block in idle:
                del idle[block]
                return True
        return False

    def clear(self) -> list[int]:
        """Forget all blocks, and return those that were idle. Pins stay for blocks that get the same keys later."""
        idle = [*self._idle, *self._idle_pinned]
        for known in (self._block_of, self._key_of, self._idle, self._idle_pinned):
            known.clear()
        return idle

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Pin these keys for a session, so that their blocks are evicted last."""
        for key in hashes:
            self._pins[key] += 1
            block = self._block_of.get(key)
            if block is not None and block in self._idle:
                del self._idle[block]
                self._idle_pinned[block] = None

    def unpin(self, hashes: Iterable[bytes]) -> None:
        """Undo one `pin` of each."""
        for key in hashes:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]
                block = self._block_of.get(key)
                if block is not None and block in self._idle_pinned:
                    del self._idle_pinned[block]
                    self._idle[block] = None

    def check_integrity(self, references: Sequence[int], free: Sequence[int]) -> None:
        """Raise AssertionError unless every cached block is either held or idle, once."""
        idle = list(self._idle) + list(self._idle_pinned)
        assert len(idle) == len(set(idle)), "a block is twice idle"
        assert all(references[block] == 0 for block in idle), "an idle block is referenced"
        assert all(self._block_of[key] == block for block, key in self._key_of.items()), "keys and blocks disagree"
        assert len(self._block_of) == len(self._key_of), "keys and blocks disagree in number"
        unreferenced = {block for block in self._key_of if references[block] == 0}
        assert unreferenced == set(idle), "an unreferenced cached block is not idle"
        assert not unreferenced & set(free), "a cached block is in the free list"
        assert set(self._idle_pinned) == {block for block in idle if self._key_of[block] in self._pins}, (
            "pinned blocks and pins disagree"
        )
