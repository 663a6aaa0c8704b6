"""Channel: messages and file descriptors over one end of a socket pair, in an event loop.

A message is its length, 8 bytes, followed by its bytes. Nothing waits: data that the socket does not accept at once is
sent when it becomes writable, and arriving data is handed over message by message.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

__all__ = ["Channel"]

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**20
_WRITE_BYTES = 2**20
"""Maximum number of bytes written at a time: a fraction of a millisecond."""
_MAX_DESCRIPTORS = 8
"""Maximum number of descriptors received at a time."""


class Channel:
    """Written by its event loop's thread only. `on_end` is called once, when the other end is closed or broken."""

    def __init__(
        self, end: socket.socket, on_message: Callable[[memoryview], None], on_end: Callable[[], None]
    ) -> None:
        """Take over one end of a pair, in the running event loop."""
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        """Data that the socket has not accepted yet, with the descriptors that go with its first byte."""
        self.descriptors: deque[int] = deque()
        """Received descriptors, in order. The owner of the message that they belong to takes and closes them."""
        self.closed = False
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, data: bytes, descriptors: tuple[int, ...] = (), *, tail: memoryview | None = None) -> None:
        """Send a message; the caller may close its descriptors at once. `tail` is the rest of the message, which is not
        copied and must not change. A broken channel discards the message; `on_end` reports that it is broken."""
        if self.closed:
            return
        kept = [os.dup(descriptor) for descriptor in descriptors]
        waiting = bool(self._unsent)
        length = len(data) + (0 if tail is None else len(tail))
        self._unsent.append((memoryview(_LENGTH.pack(length) + data), kept))
        if tail is not None:
            self._unsent.append((tail, []))
        if not waiting:
            self._write()

    def close(self) -> None:
        """Close this end. Unsent data is lost, and `on_end` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, kept in self._unsent:
            _close_all(kept)
        self._unsent.clear()
        _close_all(self.descriptors)
        self.descriptors.clear()

    def _write(self) -> None:
        """Send unsent data, at most `_WRITE_BYTES` per turn; continue when the socket accepts more."""
        left = _WRITE_BYTES
        while self._unsent:
            if left <= 0:
                # The rest is sent after the event loop's other work.
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            data, kept = self._unsent[0]
            try:
                if kept:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", kept))
                    count = self._socket.sendmsg([data], [rights])
                else:
                    count = self._socket.send(data[:left])
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                # The reader sees the end too, and reports it once everything that has arrived is read.
                break
            _close_all(kept)
            left -= count
            if count < len(data):
                self._unsent[0] = (data[count:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            data, arrived, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, arrived = b"", []
        self.descriptors.extend(arrived)
        if not data:
            self.close()
            self._on_end()
            return
        self._received += data
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand over all messages that have arrived completely."""
        start, size = 0, len(self._received)
        with memoryview(self._received) as received:
            while size - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(received, start)
                end = start + _LENGTH.size + length
                if end > size:
                    break
                with received[start + _LENGTH.size : end] as message:
                    self._on_message(message)
                start = end
        del self._received[:start]


def _close_all(descriptors: list[int] | deque[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
