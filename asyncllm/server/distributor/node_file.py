"""NodeFile: keeps the nodes that were added by hand, for the next start of the distributor.

Nodes of the command line and those that register themselves are not in it: they are there again by themselves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asyncllm.errors import InvalidParameter
from asyncllm.server.distributor.nodes import Node

__all__ = ["NodeFile"]


class _Entry(msgspec.Struct):
    url: str
    speed: float | None = None


class NodeFile:
    """One file in the state folder. Written by the node routes."""

    def __init__(self, folder: str, port: int) -> None:
        """`port`: that of the distributor, so that several can share a folder."""
        self._path = Path(folder) / f"nodes-{port}.json"
        self._writing = asyncio.Lock()

    def read(self) -> list[Node]:
        """Return the nodes; empty without a file. Blocks. Raises InvalidParameter for a file that cannot be used."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            entries = msgspec.json.decode(self._path.read_bytes(), type=list[_Entry])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidParameter(
                f"The list of nodes {str(self._path)!r} cannot be read ({error}). Delete it, or choose another folder.",
                "state_folder",
            ) from None
        nodes = []
        for entry in entries:
            node = Node(entry.url)
            node.speed = entry.speed
            nodes.append(node)
        return nodes

    async def write(self, nodes: Iterable[Node]) -> None:
        """Replace the file as a whole, so that a crash leaves the old one or the new one. Raises OSError."""
        entries = [_Entry(node.url, node.speed) for node in nodes if not node.configured and node.lease_end is None]
        async with self._writing:
            await asyncio.to_thread(self._replace, msgspec.json.format(msgspec.json.encode(entries)))

    def _replace(self, data: bytes) -> None:
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
