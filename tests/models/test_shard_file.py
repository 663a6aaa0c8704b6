"""Files that are written tensor by tensor are what the format's own library reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint
from asyncllm.models.loading import shard_file
from asyncllm.models.loading.checkpoint import Checkpoint, read_header
from asyncllm.models.loading.output_folder import write_shards
from asyncllm.models.loading.shard_file import DTYPE_NAMES, ShardFile


def tensors() -> dict[str, Tensor]:
    """Of every dtype, of odd sizes and shapes."""
    numbers = torch.arange(21, dtype=torch.float64).view(3, 7) / 4
    made = {f"of/{name}": numbers.to(dtype) for dtype, name in DTYPE_NAMES.items()}
    made |= {"none": torch.zeros(0, 4), "number": torch.tensor(2.5), "byte": torch.tensor(7, dtype=torch.uint8)}
    return {**made, "columns": numbers.t(), "rows": numbers[1:, ::2], "wide": numbers.expand(2, 3, 7)}


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a dict
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("most", [10**9, 200, 1])
def test_what_is_written_is_read(tmp_path: Path, most: int) -> None:
    write_shards(tensors().items(), tmp_path, most)
    assert_same(read(tmp_path), tensors())
    assert Checkpoint.open(tmp_path).tensors.keys() == tensors().keys()
    assert (len(list(tmp_path.iterdir())) == 1) == (most == 10**9)


def test_every_tensor_begins_where_it_can_be_mapped(tmp_path: Path) -> None:
    write_shards(tensors().items(), tmp_path)
    for name, entry in read_header(tmp_path / "model.safetensors").items():
        assert (entry.data_start + entry.start) % tensors()[name].itemsize == 0


def test_memory_holds_one_tensor(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            assert not any(each() is not None for each in alive)
            tensor = torch.full((3, 8), float(number))
            alive.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor

    write_shards(made(), tmp_path, 200)
    assert_same(read(tmp_path), {str(number): torch.full((3, 8), float(number)) for number in range(5)})


def test_a_full_header_ends_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "_HEADER_BYTES", 512)
    written = {f"layer.{number}": torch.ones(2) * number for number in range(7)}
    write_shards(written.items(), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(read(tmp_path), written)
    assert Checkpoint.open(tmp_path).tensors.keys() == written.keys()
    with pytest.raises(InvalidCheckpoint, match=r"no room for the tensor 'xxx"), ShardFile(tmp_path / "file") as file:
        file.add("x" * 600, torch.ones(1))
