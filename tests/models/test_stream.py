"""Reading tensors by several threads: the same bytes as the library reads, and nothing left behind when it fails."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.agent.step_thread import HasLimits, StepThread
from asyncllm.errors import InvalidCheckpoint
from asyncllm.models.baichuan import NormalizedOutputEmbedding
from asyncllm.models.build import open_model
from asyncllm.models.loading import stream as stream_module
from asyncllm.models.loading.checkpoint import Checkpoint, TensorEntry
from asyncllm.models.loading.stream import THREAD_NAME, stream
from tests.checkpoints import build_checkpoint
from tests.models.parity import FAMILIES

CPU = torch.device("cpu")
SINGLE = "model.safetensors"

TENSORS = {
    "big": torch.arange(5000, dtype=torch.float32).reshape(50, 100),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "after the scalar": torch.randn(7, 3, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "half": torch.randn(333).half(),
    "odd": torch.randn(3).bfloat16(),
    "also big": torch.randn(40, 41),
    "last and empty": torch.zeros(3, 0, dtype=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    files, threads = sorted(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert sorted(os.listdir("/proc/self/fd")) == files
    assert set(threading.enumerate()) == threads


def save(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file(tensors, folder / SINGLE)
    return Checkpoint.open(folder)


@pytest.fixture
def fifty(tmp_path: Path) -> Checkpoint:
    """A checkpoint of fifty tensors of 400 bytes."""
    return save(tmp_path, {str(number): torch.randn(100) for number in range(50)})


def read(checkpoint: Checkpoint, names: list[str] | None = None, **settings: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def take(entry: TensorEntry, tensor: Tensor) -> None:
        assert entry.name not in found
        found[entry.name] = tensor.clone()

    stream([checkpoint.tensors[name] for name in names or checkpoint.tensors], CPU, take, **settings)
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("buffer_bytes", [7, 64, 1000, 2**20])
def test_the_bytes_are_those_of_the_library(tmp_path: Path, threads: int, buffer_bytes: int) -> None:
    checkpoint = save(tmp_path, TENSORS)
    same(read(checkpoint, threads=threads, buffer_bytes=buffer_bytes), load_file(tmp_path / SINGLE))


@pytest.mark.parametrize("buffer_bytes", [100, 2**20])
def test_a_selection_with_gaps(tmp_path: Path, buffer_bytes: int) -> None:
    checkpoint = save(tmp_path, TENSORS)
    names = ["odd", "big", "scalar", "last and empty"]
    same(read(checkpoint, names, buffer_bytes=buffer_bytes), {name: TENSORS[name] for name in names})
    stream([], CPU, lambda entry, tensor: pytest.fail("nothing was asked for"))


def test_several_files(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = {f"{name} {number}": tensor + number for name, tensor in TENSORS.items()}
        files.append((save(folder, tensors), tensors))
    whole = Checkpoint(tmp_path, [entry for checkpoint, _ in files for entry in checkpoint.tensors.values()])
    same(read(whole, threads=4, buffer_bytes=512), {name: t for _, tensors in files for name, t in tensors.items()})


def test_threads_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four readers waits in its first read until all four are there."""
    together = threading.Barrier(4, timeout=20)
    preadv = os.preadv

    def meet(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if position < checkpoint.tensors["x"].data_start + 4 * 1000:
            together.wait()
        return preadv(descriptor, buffers, position)

    checkpoint = save(tmp_path, {"x": torch.randn(2500)})
    monkeypatch.setattr(stream_module.os, "preadv", meet)
    same(read(checkpoint, threads=4, buffer_bytes=1000), load_file(tmp_path / SINGLE))


def test_reads_that_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(stream_module.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:13]], at))
    checkpoint = save(tmp_path, TENSORS)
    same(read(checkpoint, threads=2, buffer_bytes=900), load_file(tmp_path / SINGLE))


@pytest.mark.parametrize("lost", [1, 3000, 20_000])
def test_a_file_that_was_cut_after_validation(tmp_path: Path, lost: int) -> None:
    checkpoint = save(tmp_path, TENSORS)
    size = (tmp_path / SINGLE).stat().st_size
    os.truncate(tmp_path / SINGLE, size - lost)
    with pytest.raises(InvalidCheckpoint, match=f"could not be read .it ends at byte {size - lost}") as caught:
        read(checkpoint, buffer_bytes=500)
    assert str(tmp_path / SINGLE) in str(caught.value)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, TENSORS)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(InvalidCheckpoint, match="could not be read") as caught:
        read(checkpoint)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    preadv = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], position: int) -> int:
        reads.append(position)
        if len(reads) > 5:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, position)

    checkpoint = save(tmp_path, TENSORS)
    monkeypatch.setattr(stream_module.os, "preadv", fail)
    with pytest.raises(InvalidCheckpoint, match="Input/output error"):
        read(checkpoint, threads=3, buffer_bytes=500)


@pytest.mark.parametrize("error", [MemoryError("device full"), KeyboardInterrupt()])
def test_a_consumer_that_raises_ends_the_threads(fifty: Checkpoint, error: BaseException) -> None:
    taken: list[str] = []

    def take(entry: TensorEntry, tensor: Tensor) -> None:
        taken.append(entry.name)
        if len(taken) == 4:
            raise error

    with pytest.raises(type(error)):
        stream(fifty.tensors.values(), CPU, take, threads=4, buffer_bytes=400)
    assert len(taken) == 4
    assert not any(thread.name.startswith(THREAD_NAME) for thread in threading.enumerate())


def test_a_thread_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    checkpoint = save(tmp_path, TENSORS)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        read(checkpoint, threads=4, buffer_bytes=500)


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_start_that_is_cancelled_while_weights_stream(fifty: Checkpoint) -> None:
    """The executor's thread goes on to the end of the load, and then it and the readers are gone."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def load() -> HasLimits:
        def take(entry: TensorEntry, tensor: Tensor) -> None:
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.002)

        stream(fifty.tensors.values(), CPU, take, threads=4, buffer_bytes=400)
        raise AssertionError("nobody waits for this one")

    executor = StepThread(load)
    starting = asyncio.create_task(executor.start())
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert any(thread.name.startswith(THREAD_NAME) for thread in threading.enumerate())
    await executor.close()
    assert not any(thread.name.startswith("asyncllm") for thread in threading.enumerate())


def test_memory_on_the_way_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that is slow does not let the readers run ahead of it by more than the buffers."""
    ahead: list[int] = []
    counted: list[int] = []
    preadv = os.preadv

    def count(descriptor: int, buffers: list[memoryview], position: int) -> int:
        counted.append(position)
        return preadv(descriptor, buffers, position)

    def take(entry: TensorEntry, tensor: Tensor) -> None:
        time.sleep(0.002)
        taken.append(entry.name)
        ahead.append(len(counted) - len(taken))

    taken: list[str] = []
    checkpoint = save(tmp_path, {f"{number:03}": torch.randn(100) for number in range(60)})
    monkeypatch.setattr(stream_module.os, "preadv", count)
    stream(checkpoint.tensors.values(), CPU, take, threads=3, buffer_bytes=400)
    assert len(taken) == 60
    assert max(ahead) <= 3 * stream_module.BUFFERS_PER_THREAD + 1


def test_buffers_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = stream_module._make_buffer

    def record(device: torch.device, num_bytes: int) -> stream_module._Buffer:
        buffer = make(device, num_bytes)
        made.append(num_bytes)
        alive.append(buffer.tensor)
        return buffer

    alive: list[Tensor] = []
    checkpoint = save(tmp_path, TENSORS)
    monkeypatch.setattr(stream_module, "_make_buffer", record)
    read(checkpoint, threads=2, buffer_bytes=1000)
    assert made == [1000] * len(made)
    assert len(made) <= 2 * stream_module.BUFFERS_PER_THREAD
    gc.collect()
    assert all(len(gc.get_referrers(tensor)) == 1 for tensor in alive), "somebody else than this test holds a buffer"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_streamed_tensors_as_from_mapped_ones(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    expected = open_model(tmp_path, dtype=torch.float32, device=CPU)

    def streamed(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        yield from read(checkpoint, list(names), threads=2, buffer_bytes=3000).items()

    monkeypatch.setattr(Checkpoint, "read", streamed)
    found = dict(open_model(tmp_path, dtype=torch.float32, device=CPU).named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_the_device_has_the_weights_of_one_on_the_host(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    build_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    expected = open_model(tmp_path, dtype=dtype, device=CPU)
    found = open_model(tmp_path, dtype=dtype, device=torch.device("cuda"))
    parameters = dict(found.named_parameters())
    assert parameters.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        if isinstance(expected.get_submodule(name.rpartition(".")[0]), NormalizedOutputEmbedding):
            torch.testing.assert_close(parameters[name].cpu(), parameter, rtol=1e-6, atol=0)
        else:
            assert torch.equal(parameters[name].cpu(), parameter), name


@pytest.mark.gpu
def test_the_device_keeps_nothing_but_the_parameters(tmp_path: Path) -> None:
    tensors = {f"{number}": torch.randn(1000, 1000) for number in range(20)}
    checkpoint = save(tmp_path, tensors)
    device = torch.device("cuda")
    parameters = {name: torch.full_like(tensor, float("nan"), device=device) for name, tensor in tensors.items()}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    stream(
        checkpoint.tensors.values(),
        device,
        lambda entry, tensor: parameters[entry.name].copy_(tensor),
        threads=4,
        buffer_bytes=2**20,
    )
    assert torch.cuda.memory_reserved() == before
    same({name: parameter.cpu() for name, parameter in parameters.items()}, tensors)
