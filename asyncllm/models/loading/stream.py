"""Streams tensors of a checkpoint to a device: threads read the files into page-locked buffers, which are uploaded
meanwhile.

The bytes go from page cache to buffer to device. Only the second copy is the device's; the threads make the first one,
outside the interpreter lock, and it takes most of the time. One thread, the caller's, makes all calls to torch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from asyncllm.models.loading.checkpoint import TensorEntry, unreadable

__all__ = ["BUFFER_BYTES", "DTYPES", "FLOAT_DTYPES", "READ_THREADS", "stream"]

FLOAT_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""Dtypes of unquantized weights, by their names in the format."""

DTYPES = {
    **FLOAT_DTYPES,
    **{"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn},
}
"""All dtypes that can be streamed."""

READ_THREADS = 8
BUFFER_BYTES = 4 * 2**20
"""Measured with 16 GB of bfloat16 in the page cache of a 16-core machine with an H200, in GB/s (PCIe carries 55):

    threads   4 MiB   16 MiB   32 MiB   64 MiB
    4          32.9     30.1     19.9     16.5
    8          44.8     32.5     22.4     18.1
    16         36.5     25.9     19.6     12.7

One thread reads 8.7 GB/s. Larger buffers are slower because of the driver, which takes 0.34 s to lock a GB of them.
"""
BUFFERS_PER_THREAD = 2
"""One to read into while the other waits for its copy."""

THREAD_NAME = "asyncllm-read"

ALIGNMENT = 8
"""Tensors share a piece of device memory only if each begins at a multiple of the largest element size."""

Take = Callable[[TensorEntry, Tensor], None]
"""Takes a tensor that has arrived on the device."""


@dataclass(slots=True)
class _Span:
    """Consecutive tensors of a file that arrive together, or one tensor larger than a buffer."""

    descriptor: int
    start: int
    """Position in the file."""
    entries: list[TensorEntry]
    num_bytes: int = 0
    missing: int = 0
    """Bytes that have not yet been copied to `memory`."""
    memory: Tensor | None = None
    """uint8 [num_bytes] on the device, from the first chunk until the tensors are taken."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The content of one buffer: bytes `offset` to `offset + length` of a span."""

    span: _Span
    offset: int
    length: int


@dataclass(slots=True)
class _Buffer:
    """Host memory, as seen by torch and by the operating system."""

    tensor: Tensor
    view: memoryview
    copied: torch.cuda.Event | None


@dataclass(slots=True)
class _Traffic:
    """State shared by the caller's thread and the readers."""

    chunks: deque[_Chunk]
    """Chunks that no reader has started, in file order."""
    free: SimpleQueue[_Buffer | None] = field(default_factory=SimpleQueue)
    """Buffers to read into; None ends a reader."""
    filled: SimpleQueue[tuple[_Chunk, _Buffer] | BaseException] = field(default_factory=SimpleQueue)


def stream(
    entries: Iterable[TensorEntry],
    device: torch.device,
    take: Take,
    *,
    threads: int = READ_THREADS,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Read tensors with several threads, and pass each, whole and on `device`, to `take(entry, tensor)`.

    `take` is called in the caller's thread, once per tensor and approximately in file order. On a CUDA device, the
    current stream is then the loader's own: work that `take` enqueues on it is done when `stream` returns, and the
    tensor's memory is reused afterwards. Besides the parameters, device memory holds at most one buffer's worth per
    buffer, and the tensors in transit that are larger than a buffer.

    When it returns or raises, the threads have ended, the files are closed and the buffers are freed.

    Raises:
        InvalidCheckpoint: a file has vanished, is shorter than its header says, or cannot be read.
        Any error of `take`.
    """
    with ExitStack() as stack:
        spans = _plan(entries, buffer_bytes, lambda file: _open(file, stack))
        traffic = _Traffic(deque(_chunks(spans, buffer_bytes)))
        threads = min(threads, len(traffic.chunks))
        stack.enter_context(_upload_stream(device))
        _receive(traffic, device, take, threads)


def _receive(traffic: _Traffic, device: torch.device, take: Take, threads: int) -> None:
    """Copy every chunk to the device as its buffer is filled, and hand over completed tensors."""
    num_chunks = len(traffic.chunks)
    buffer_bytes = max((chunk.length for chunk in traffic.chunks), default=0)
    num_buffers = threads * BUFFERS_PER_THREAD
    copying: deque[_Buffer] = deque()
    made = received = 0
    with _readers(traffic, threads):
        while received < num_chunks:
            try:
                # While nothing has arrived, there is time to allocate another buffer, which takes the driver
                # milliseconds, or to wait until the device is done with one.
                arrived = traffic.filled.get(block=made == num_buffers and not copying)
            except Empty:
                if made < num_buffers:
                    made += 1
                    traffic.free.put(_make_buffer(device, buffer_bytes))
                else:
                    buffer = copying.popleft()
                    if buffer.copied is not None:
                        buffer.copied.synchronize()
                    traffic.free.put(buffer)
                continue
            if isinstance(arrived, BaseException):
                raise arrived
            chunk, buffer = arrived
            span = chunk.span
            if span.memory is None:
                span.memory = torch.empty(span.num_bytes, dtype=torch.uint8, device=device)
            span.memory[chunk.offset :][: chunk.length].copy_(buffer.tensor[: chunk.length], non_blocking=True)
            if buffer.copied is not None:
                buffer.copied.record()
            copying.append(buffer)
            received += 1
            span.missing -= chunk.length
            if not span.missing:
                _hand_over(span, span.memory, take)
                span.memory = None


def _hand_over(span: _Span, memory: Tensor, take: Take) -> None:
    begin = span.entries[0].start
    for entry in span.entries:
        stored = memory[entry.start - begin :][: entry.num_bytes]
        take(entry, stored.view(DTYPES[entry.dtype]).view(entry.shape))


def _open(file: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise unreadable(file, error) from error
    stack.callback(os.close, descriptor)
    return descriptor


def _plan(entries: Iterable[TensorEntry], max_bytes: int, open_file: Callable[[Path], int]) -> list[_Span]:
    """Return spans of at most `max_bytes` bytes, or of a single larger tensor, in the order of each file."""
    spans: list[_Span] = []
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, wanted in by_file.items():
        wanted.sort(key=lambda entry: (entry.start, entry.end))
        descriptor = open_file(file)
        span: _Span | None = None
        for entry in wanted:
            begin = span.entries[0].start if span else 0
            joins = span is not None and entry.start == begin + span.num_bytes and entry.end - begin <= max_bytes
            joins = joins and span is not None and not entry.stride and not span.entries[-1].stride
            if span is None or not joins or (entry.start - begin) % ALIGNMENT:
                span = _Span(descriptor, entry.data_start + entry.start, [])
                spans.append(span)
            span.entries.append(entry)
            span.num_bytes += entry.num_bytes
            span.missing = span.num_bytes
    return spans


def _chunks(spans: Iterable[_Span], max_bytes: int) -> Iterator[_Chunk]:
    for span in spans:
        # A span of empty tensors is a chunk too: it carries no bytes, but its tensors have to be taken.
        for offset in range(0, max(span.num_bytes, 1), max_bytes):
            yield _Chunk(span, offset, min(max_bytes, span.num_bytes - offset))


def _make_buffer(device: torch.device, num_bytes: int) -> _Buffer:
    """Allocate memory: page-locked for a CUDA device, which copies from it at full speed and without waiting."""
    pinned = device.type == "cuda"
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
    return _Buffer(tensor, tensor.numpy().data, copied)


@contextmanager
def _upload_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream the current one. On exit its work is done, and unused memory is returned to the driver."""
    if device.type != "cuda":
        yield
        return
    uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Work enqueued earlier may still be using the parameters' memory.
    uploads.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(uploads):
            yield
    finally:
        uploads.synchronize()
        torch.cuda.empty_cache()
        # The public name is newer than the oldest supported torch.
        release_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        release_host_cache()


@contextmanager
def _readers(traffic: _Traffic, count: int) -> Iterator[None]:
    """Run reader threads, which end when the block is left."""
    readers = [
        threading.Thread(target=_read, args=(traffic,), name=f"{THREAD_NAME}-{number}", daemon=True)
        for number in range(count)
    ]
    started: list[threading.Thread] = []
    try:
        for reader in readers:
            reader.start()
            started.append(reader)
        yield
    finally:
        # A reader that gets a buffer first finds no chunk for it, and ends too.
        traffic.chunks.clear()
        for _ in started:
            traffic.free.put(None)
        for reader in started:
            reader.join()
        # Items left in the queues would keep the buffers alive.
        for queue in (traffic.free, traffic.filled):
            while not queue.empty():
                queue.get()


def _read(traffic: _Traffic) -> None:
    """Fill buffers with chunks until either runs out: the body of a reader thread."""
    while (buffer := traffic.free.get()) is not None:
        try:
            chunk = traffic.chunks.popleft()
        except IndexError:
            return
        try:
            _fill(buffer.view[: chunk.length], chunk)
        except BaseException as error:
            traffic.filled.put(error)
            return
        traffic.filled.put((chunk, buffer))


def _fill(view: memoryview, chunk: _Chunk) -> None:
    entry = chunk.span.entries[0]
    if not entry.stride:
        _read_at(view, chunk, chunk.span.start + chunk.offset)
        return
    run, read = entry.num_bytes // entry.shape[0], 0
    while read < len(view):
        row, passed = divmod(chunk.offset + read, run)
        count = min(run - passed, len(view) - read)
        _read_at(view[read : read + count], chunk, chunk.span.start + row * entry.stride + passed)
        read += count


def _read_at(view: memoryview, chunk: _Chunk, position: int) -> None:
    file, read = chunk.span.entries[0].file, 0
    while read < len(view):
        try:
            count = os.preadv(chunk.span.descriptor, [view[read:]], position + read)
        except OSError as error:
            raise unreadable(file, error) from error
        if count == 0:
            raise unreadable(file, f"it ends at byte {os.fstat(chunk.span.descriptor).st_size}")
        read += count
