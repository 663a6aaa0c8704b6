"""Safetensors folders: what is read, and what is refused, byte by byte."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from asyncllm.errors import InvalidCheckpoint, ModelNotFound
from asyncllm.models.loading.checkpoint import Checkpoint, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
GOOD = {"a": A, "b": B}


def pack(header: Any, data: bytes = bytes(32), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: Any = "F32", shape: Any = (2, 3), start: Any = 0, end: Any = 24, **more: Any) -> bytes:
    return pack({"t.weight": {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}}, bytes(24))


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def hub_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as the hub lays it out: in one file, and in shards."""
    model = tiny_llama()
    folders = {name: tmp_path_factory.mktemp(name) for name in ("single", "sharded")}
    model.save_pretrained(folders["single"])
    model.save_pretrained(folders["sharded"], max_shard_size="6KB")
    return folders


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_hub_checkpoint_reads_as_saved(hub_folders: dict[str, Path], layout: str) -> None:
    folder = hub_folders[layout]
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 1 if layout == "single" else len(files) > 2
    saved = {name: value for file in files for name, value in load_file(file).items()}
    checkpoint = Checkpoint.open(folder)
    before = sorted(os.listdir("/proc/self/fd"))
    read = {name: value.clone() for name, value in checkpoint.read()}
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert read.keys() == saved.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)
    assert checkpoint.num_bytes == sum(value.nbytes for value in saved.values())
    assert {name: entry.shape for name, entry in checkpoint.tensors.items()} == {n: v.shape for n, v in saved.items()}


def test_read_takes_a_selection(hub_folders: dict[str, Path]) -> None:
    checkpoint = Checkpoint.open(hub_folders["sharded"])
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    assert {name for name, _ in checkpoint.read(names)} == set(names)
    assert list(checkpoint.read([])) == []


def test_a_reader_dropped_half_way_closes_its_file(hub_folders: dict[str, Path]) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    reader = Checkpoint.open(hub_folders["single"]).read()
    next(reader)
    reader.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    dtypes += [torch.uint16, torch.uint32, torch.uint64]
    save_file({str(dtype): torch.zeros(2, 3).to(dtype) for dtype in dtypes}, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: value.dtype for name, value in checkpoint.read()} == {str(dtype): dtype for dtype in dtypes}


def test_odd_but_valid_headers(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [4, 4]},
        "packed": {"dtype": "F4", "shape": [3, 2], "data_offsets": [4, 7]},
    }
    (tmp_path / SINGLE).write_bytes(pack(json.dumps(header).encode() + b"   ", bytes(7)))
    assert set(read_header(tmp_path / SINGLE)) == {"scalar", "empty", "packed"}


def test_the_single_file_wins_over_an_index(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(pack(GOOD))
    (tmp_path / INDEX).write_text("not JSON")
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}


BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["0 bytes"]),
    "seven bytes": (b"\0" * 7, ["7 bytes"]),
    "no header": (struct.pack("<Q", 0), ["header", "not JSON"]),
    "header longer than the file": (pack(GOOD, b"", length=10_000), ["truncated", "10000"]),
    "header length 2^64 - 1": (pack(GOOD, length=2**64 - 1), ["truncated", str(2**64 - 1)]),
    "header cut": (pack(GOOD)[:60], ["truncated"]),
    "header length too small": (pack(GOOD, length=20), ["header", "not JSON"]),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", ["git lfs pull"]),
    "a pickle": (b"\x80\x02}q\x00." * 40, ["truncated"]),
    "header not UTF-8": (pack(b'{"\xff": 1}'), ["header", "not JSON"]),
    "header not JSON": (pack(b"{a: 1}"), ["header", "not JSON"]),
    "header with NaN": (pack(b'{"a": NaN}'), ["NaN"]),
    "header a list": (pack([]), ["list"]),
    "header a number": (pack(3), ["int"]),
    "header too deep": (pack(b"[" * 200_000), ["header", "not JSON"]),
    "header with a number of 10^5 digits": (pack(b'{"a": ' + b"9" * 100_000 + b"}"), ["header", "not JSON"]),
    "duplicate tensor": (
        pack(b'{"a": %s, "a": %s}' % (json.dumps(A).encode(), json.dumps(A).encode()), bytes(24)),
        ["'a'", "twice"],
    ),
    "duplicate field": (
        pack(b'{"t.weight": {"dtype": "F32", "dtype": "I8", "shape": [6], "data_offsets": [0, 24]}}', bytes(24)),
        ["'dtype'", "twice"],
    ),
    "metadata not a mapping": (pack({"__metadata__": [1], **GOOD}), ["__metadata__"]),
    "metadata not strings": (pack({"__metadata__": {"a": 1}, **GOOD}), ["__metadata__"]),
    "tensor without a name": (pack({"": A}, bytes(24)), ["''", "without a name"]),
    "tensor not an object": (pack({"t.weight": 3}), ["t.weight", "exactly the fields"]),
    "tensor without dtype": (pack({"t.weight": {"shape": [6], "data_offsets": [0, 24]}}), ["t.weight", "dtype"]),
    "tensor with another field": (tensor(device="cuda"), ["t.weight", "exactly the fields"]),
    "unknown dtype": (tensor(dtype="F128"), ["t.weight", "'F128'"]),
    "dtype in lower case": (tensor(dtype="f32"), ["t.weight", "'f32'"]),
    "dtype not a text": (tensor(dtype=["F32"]), ["t.weight", "['F32']"]),
    "dtype of another size": (tensor(dtype="F16"), ["t.weight", "12 bytes", "24 bytes"]),
    "shape a number": (tensor(shape=6), ["t.weight", "shape 6"]),
    "shape with a fraction": (tensor(shape=[2.0, 3]), ["t.weight", "2.0"]),
    "shape with a truth value": (tensor(shape=[True, 6]), ["t.weight", "True"]),
    "shape below zero": (tensor(shape=[-2, -3]), ["t.weight", "-2"]),
    "shape of 2^63": (tensor(shape=[2**63]), ["t.weight", str(2**63)]),
    "shape product of 2^124": (tensor(shape=[2**62, 2**62]), ["t.weight", str(2**126)]),
    "shape product that wraps to 24 bytes": (tensor(shape=[2**62 + 6]), ["t.weight", str((2**62 + 6) * 4)]),
    "shape of 1000 dimensions": (tensor(shape=[1] * 1000), ["t.weight", "1000 dimensions"]),
    "shape too small": (tensor(shape=[2, 2]), ["t.weight", "16 bytes", "24 bytes"]),
    "half a byte": (tensor(dtype="F4", shape=[3], end=1), ["t.weight", "1.5 bytes"]),
    "one offset": (pack({"t.weight": {**A, "data_offsets": [24]}}), ["t.weight", "[24]"]),
    "offsets not integers": (tensor(start="0"), ["t.weight", "'0'"]),
    "offsets below zero": (tensor(start=-24, end=0), ["t.weight", "-24"]),
    "offsets backwards": (tensor(start=24, end=0), ["t.weight", "[24, 0]"]),
    "offsets of 2^80": (tensor(start=2**80, end=2**80 + 24), ["t.weight", "truncated"]),
    "data cut": (pack(GOOD)[:-1], ["'b'", "truncated", "31"]),
    "no data": (pack(GOOD, b""), ["'a'", "truncated"]),
    "data after the last tensor": (pack(GOOD, bytes(33)), ["1 bytes after"]),
    "data and no tensor": (pack({}), ["32 bytes after"]),
    "hole before the first tensor": (
        pack({"t.weight": {**A, "data_offsets": [8, 32]}}),
        ["'t.weight'", "8 bytes before"],
    ),
    "hole between tensors": (pack({"a": A, "b": {**B, "data_offsets": [26, 34]}}, bytes(34)), ["'b'", "2 bytes"]),
    "overlapping tensors": (pack({"a": A, "b": {**B, "data_offsets": [20, 28]}}), ["'a'", "'b'", "overlapping"]),
    "two tensors on the same bytes": (pack({"a": A, "b": A}, bytes(24)), ["'a'", "'b'", "overlapping"]),
    "unprintable name": (pack({"t\n\ud800\x1b[31m": {**A, "dtype": "X"}}), [r"'t\n\ud800\x1b[31m'"]),
    "very long name": (pack({"t" * 9000: {**A, "dtype": "X"}}), ["'ttt", "...'"]),
}


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused(tmp_path: Path, case: str, layout: str) -> None:
    content, named = BAD_FILES[case]
    file = tmp_path / (SINGLE if layout == "single" else SECOND)
    file.write_bytes(content)
    if layout == "sharded":
        (tmp_path / FIRST).write_bytes(pack({"c": A}, bytes(24)))
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": FIRST, "a": SECOND, "b": SECOND}}))
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidCheckpoint) as caught:
        Checkpoint.open(tmp_path)
    message = str(caught.value)
    for text in [*named, str(file)]:
        assert text in message
    assert len(message) < 1000
    message.encode()
    assert sorted(os.listdir("/proc/self/fd")) == before


SHARDS = {FIRST: pack({"a": A}, bytes(24)), SECOND: pack({"b": {**B, "data_offsets": [0, 8]}}, bytes(8))}
WEIGHT_MAP: dict[str, Any] = {"a": FIRST, "b": SECOND}

BAD_INDEXES: dict[str, tuple[Any, list[str]]] = {
    "not JSON": (b"{", [INDEX, "not JSON"]),
    "a list": ([], [INDEX, "list"]),
    "no weight_map": ({"metadata": {}}, [INDEX, "weight_map"]),
    "weight_map a list": ({"weight_map": ["a"]}, [INDEX, "weight_map"]),
    "weight_map empty": ({"weight_map": {}}, [INDEX, "weight_map"]),
    "tensor twice": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', [INDEX, "'a'", "twice"]),
    "shard a number": ({"weight_map": {**WEIGHT_MAP, "a": 1}}, [INDEX, "'a'", "1"]),
    "shard above": ({"weight_map": {**WEIGHT_MAP, "a": "../x.safetensors"}}, [INDEX, "'../x.safetensors'"]),
    "shard absolute": ({"weight_map": {**WEIGHT_MAP, "a": "/etc/x.safetensors"}}, [INDEX, "'/etc/x.safetensors'"]),
    "shard in a folder": ({"weight_map": {**WEIGHT_MAP, "a": "s/x.safetensors"}}, [INDEX, "'s/x.safetensors'"]),
    "shard with a backslash": ({"weight_map": {**WEIGHT_MAP, "a": "s\\x.safetensors"}}, [INDEX, "x.safetensors"]),
    "shard with a NUL": ({"weight_map": {**WEIGHT_MAP, "a": "x\0.safetensors"}}, [INDEX, "x.safetensors"[1:]]),
    "shard empty": ({"weight_map": {**WEIGHT_MAP, "a": ""}}, [INDEX, "'a'"]),
    "shard a pickle": ({"weight_map": {**WEIGHT_MAP, "a": "x.bin"}}, [INDEX, "'x.bin'"]),
    "shard missing": ({"weight_map": {**WEIGHT_MAP, "a": "x.safetensors"}}, [INDEX, "'a'", "'x.safetensors'"]),
    "tensor in the wrong shard": ({"weight_map": {**WEIGHT_MAP, "a": SECOND}}, ["'a'"]),
    "tensors swapped": ({"weight_map": {"a": SECOND, "b": FIRST}}, [INDEX]),
    "tensor missing from its shard": ({"weight_map": {**WEIGHT_MAP, "c": SECOND}}, [INDEX, "'c'", SECOND]),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_a_wrong_index_is_refused(tmp_path: Path, case: str) -> None:
    content, named = BAD_INDEXES[case]
    for file, shard in SHARDS.items():
        (tmp_path / file).write_bytes(shard)
    (tmp_path / INDEX).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InvalidCheckpoint) as caught:
        Checkpoint.open(tmp_path)
    for text in [*named, str(tmp_path)]:
        assert text in str(caught.value).replace("\\x00", "")


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_bytes(SHARDS[FIRST])
    (tmp_path / SECOND).write_bytes(pack(GOOD))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": WEIGHT_MAP}))
    with pytest.raises(InvalidCheckpoint, match=f"{SECOND} holds tensor 'a', which {FIRST} holds too"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("names", [(FIRST, SECOND), ("a.safetensors", "b.safetensors"), ("model.fp16.safetensors",)])
@pytest.mark.parametrize("other", [False, True])
def test_all_files_are_read_without_an_index(tmp_path: Path, names: tuple[str, ...], other: bool) -> None:
    """Mistral's own copy of the weights, under other names, is left out."""
    for name, shard in zip(names, SHARDS.values(), strict=False):
        (tmp_path / name).write_bytes(shard)
    if other:
        (tmp_path / "consolidated-00001-of-00009.safetensors").write_bytes(pack(GOOD))
        (tmp_path / "consolidated.safetensors").write_bytes(b"x")
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: entry.file.name for name, entry in checkpoint.tensors.items()} == dict(zip("ab", names, strict=False))
    assert len(dict(checkpoint.read())) == len(names)


def test_files_without_an_index_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_bytes(SHARDS[FIRST])
    with pytest.raises(InvalidCheckpoint, match=rf"{FIRST} is one of 2 files by its name, and 1 are here\. Download"):
        Checkpoint.open(tmp_path)
    (tmp_path / SECOND).write_bytes(pack(GOOD))
    with pytest.raises(InvalidCheckpoint, match=f"{SECOND} holds tensor 'a', which {FIRST} holds too. Remove the file"):
        Checkpoint.open(tmp_path)
    (tmp_path / SECOND).write_bytes(b"x")
    with pytest.raises(InvalidCheckpoint, match=f"{SECOND} has 1 bytes"):
        Checkpoint.open(tmp_path)


def write(*names: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"x")

    return prepare


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (write(), ["no weights", SINGLE]),
        (write("config.json", "tokenizer.json"), ["no weights", SINGLE]),
        (write("pytorch_model.bin"), ["pytorch_model.bin", "asyncllm convert"]),
        (write("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), ["asyncllm convert"]),
        (write("model.pt"), ["model.pt", "asyncllm convert"]),
        (write("model.ckpt"), ["model.ckpt", "asyncllm convert"]),
        (write("model.gguf"), ["model.gguf", "gguf_file", "asyncllm lite"]),
        (write("consolidated.safetensors"), ["consolidated.safetensors", "Mistral's own layout"]),
        (write("training_args.bin"), ["no weights"]),
        (write("consolidated.safetensors", "pytorch_model.bin"), ["pytorch_model.bin", "asyncllm convert"]),
        (lambda folder: (folder / SINGLE).mkdir(), [SINGLE, "cannot be read"]),
        (lambda folder: (folder / INDEX).mkdir(), [INDEX, "cannot be read"]),
        (lambda folder: os.mkfifo(folder / SINGLE), [SINGLE, "not a file"]),
        (lambda folder: os.mkfifo(folder / INDEX), [INDEX, "not a file"]),
        (lambda folder: (folder / SINGLE).symlink_to("absent"), [SINGLE, "No such file"]),
        (lambda folder: (folder / INDEX).symlink_to("absent"), [INDEX, "No such file"]),
    ],
)
def test_a_folder_without_safetensors_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], named: list[str]
) -> None:
    prepare(tmp_path)
    with pytest.raises(InvalidCheckpoint) as caught:
        Checkpoint.open(tmp_path)
    for text in [*named, str(tmp_path)]:
        assert text in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(ModelNotFound, match=path.name):
            Checkpoint.open(path)


def test_a_file_that_changes_after_validation(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(pack(GOOD))
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / SINGLE).write_bytes(pack({"a": A}, bytes(24)))
    with pytest.raises(InvalidCheckpoint, match="could not be read"):
        list(checkpoint.read(["b"]))
    (tmp_path / SINGLE).unlink()
    with pytest.raises(InvalidCheckpoint, match="could not be read"):
        list(checkpoint.read())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 200), value=st.binary(min_size=1, max_size=4), cut=st.integers(0, 60))
def test_a_flipped_or_cut_file_is_refused_or_read_within_its_bounds(
    tmp_path: Path, position: int, value: bytes, cut: int
) -> None:
    content = bytearray(pack(GOOD))
    position %= len(content)
    content[position : position + len(value)] = value
    (tmp_path / SINGLE).write_bytes(bytes(content[: max(0, len(content) - cut)]))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except InvalidCheckpoint:
        return
    assert sum(entry.end - entry.start for entry in checkpoint.tensors.values()) == 32
    for name, read in checkpoint.read():
        assert read.shape == checkpoint.tensors[name].shape
        assert read.numel() == math.prod(checkpoint.tensors[name].shape)
