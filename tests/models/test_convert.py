"""`.bin` folders become safetensors folders, whole or not at all, and no pickle runs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelError, ModelNotFound
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.convert import convert
from asyncllm.models.loading.shard_file import ShardFile

SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
INDEX = "pytorch_model.bin.index.json"


class RunsCode:
    """A pickle of this writes a file when it is loaded without care."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"import pathlib; pathlib.Path({str(self.marker)!r}).touch()",)


def llama(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).bfloat16()
    model.train(False)
    return model


def bin_folder(folder: Path, state: Any, *, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def sharded_folder(folder: Path, state: dict[str, Tensor], weight_map: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(state)
    split = [names[: len(names) // 2], names[len(names) // 2 :]]
    for file, names in zip(SHARDS, split, strict=True):
        torch.save({name: state[name] for name in names}, folder / file)
    full = {name: file for file, part in zip(SHARDS, split, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": full if weight_map is None else weight_map}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in Checkpoint.open(folder).read()}


def assert_same(read: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_one_file(tmp_path: Path) -> None:
    state = llama().state_dict()
    source = bin_folder(tmp_path / "model", state)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "LICENSE", "README.md"):
        (source / name).write_text(name)
    pooling = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (source / "modules.json").write_text(json.dumps([pooling]))
    for name in ("1_Pooling", "onnx"):
        (source / name).mkdir()
        (source / name / "config.json").write_text(name)
    for name in ("modeling_llama.py", "optimizer.pt", "training_args.bin", "old.bin.index.json", "tf_model.h5"):
        (source / name).write_text(name)
    before = sorted(os.listdir("/proc/self/fd"))
    report = convert(source)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert report.destination == tmp_path / "model-safetensors"
    assert report.files == ("model.safetensors",)
    assert report.num_tensors == len(state)
    assert report.num_bytes == sum(tensor.nbytes for tensor in state.values())
    assert report.dropped == ()
    assert_same(read(report.destination), state)
    copied = {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "LICENSE", "README.md"}
    copied |= {"modules.json", "1_Pooling", "additional_chat_templates"}
    assert (report.destination / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    assert {path.name for path in report.destination.iterdir()} == {"config.json", "model.safetensors", *copied}
    assert (report.destination / "1_Pooling" / "config.json").read_text() == "1_Pooling"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-safetensors"]


@pytest.mark.parametrize("legacy", [False, True])
def test_shards_in_and_out(tmp_path: Path, legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = llama().state_dict()
    if legacy:
        monkeypatch.setattr(torch, "save", partial(torch.save, _use_new_zipfile_serialization=False))
    source = sharded_folder(tmp_path / "model", state)
    report = convert(source, tmp_path / "new" / "out", max_shard_bytes=5_000)
    assert len(report.files) > 2
    assert all(name.endswith(f"-of-{len(report.files):05}.safetensors") for name in report.files)
    assert_same(read(report.destination), state)
    assert json.loads((report.destination / "model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": report.num_bytes
    }
    for file in report.files:
        tensors = load_file(report.destination / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 5_000


def test_transformers_reads_what_was_converted(tmp_path: Path) -> None:
    model = llama(tied=True)
    source = bin_folder(tmp_path / "model", model.state_dict(), config=model.config.to_dict())
    report = convert(source, max_shard_bytes=5_000)
    assert report.dropped == ("lm_head.weight",)
    disable_progress_bar()  # its monitor thread outlives the test
    again = LlamaForCausalLM.from_pretrained(report.destination, dtype=torch.bfloat16)
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("config", "dropped"),
    [
        ({"tie_word_embeddings": True}, ("lm_head.weight",)),
        ({"tie_word_embeddings": False}, ()),
        ({"tie_word_embeddings": "true"}, ()),
        ({}, ()),
    ],
)
def test_a_tied_head_is_dropped_when_the_config_says_so(
    tmp_path: Path, config: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    state = llama(tied=True).state_dict()
    report = convert(bin_folder(tmp_path / "model", state, config=config))
    assert report.dropped == dropped
    assert_same(read(report.destination), {name: value for name, value in state.items() if name not in dropped})


def test_a_head_of_its_own_is_kept_whatever_the_config_says(tmp_path: Path) -> None:
    state = llama().state_dict()
    report = convert(bin_folder(tmp_path / "model", state, config={"tie_word_embeddings": True}))
    assert report.dropped == ()
    assert_same(read(report.destination), state)


def test_views_parameters_and_odd_tensors(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "rows": whole[1:3],
        "columns": whole[:, 2:4],
        "transposed": whole.t(),
        "whole": whole,
        "again": whole,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 5),
        "nothing": torch.empty(0, 5),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "expanded": torch.ones(1).expand(4),
    }
    report = convert(bin_folder(tmp_path / "model", state))
    assert_same(read(report.destination), {name: value.detach() for name, value in state.items()})


def write_pickle(marker: Path, folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": torch.ones(2), "b": RunsCode(marker)}))


def cut(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])


Change = Callable[[Path, Path], object]
"""Damages a folder; the first argument is the marker that code in a pickle would leave."""


def content(value: bytes) -> Change:
    return lambda marker, folder: (folder / "pytorch_model.bin").write_bytes(value)


def state(value: Any) -> Change:
    return lambda marker, folder: torch.save(value, folder / "pytorch_model.bin")


def second_shard(make: Callable[[Path], Any]) -> Change:
    def change(marker: Path, folder: Path) -> None:
        index({"a": SHARDS[0], "b": SHARDS[1]})(marker, folder)
        torch.save(make(marker), folder / SHARDS[1])

    return change


def hostile(**how: bool) -> Change:
    return lambda marker, folder: torch.save({"a": RunsCode(marker)}, folder / "pytorch_model.bin", **how)


def config(value: bytes | None) -> Change:
    def change(marker: Path, folder: Path) -> None:
        (folder / "config.json").unlink()
        if value is not None:
            (folder / "config.json").write_bytes(value)

    return change


def index(value: Any) -> Change:
    def change(marker: Path, folder: Path) -> None:
        (folder / "pytorch_model.bin").rename(folder / SHARDS[0])
        (folder / INDEX).write_text(value if isinstance(value, str) else json.dumps({"weight_map": value}))

    return change


BAD: dict[str, tuple[Change, list[str]]] = {
    "a pickle that runs code": (write_pickle, ["pytorch_model.bin", "needs code"]),
    "a torch file that runs code": (hostile(), ["pytorch_model.bin", "needs code"]),
    "a legacy torch file that runs code": (
        hostile(_use_new_zipfile_serialization=False),
        ["pytorch_model.bin", "needs code"],
    ),
    "code in the second shard": (second_shard(lambda marker: {"b": RunsCode(marker)}), [SHARDS[1], "needs code"]),
    "cut": (lambda marker, folder: cut(folder), ["pytorch_model.bin", "damaged"]),
    "empty file": (content(b""), ["pytorch_model.bin", "damaged"]),
    "text": (content(b"version https://git-lfs"), ["pytorch_model.bin", "damaged"]),
    "zip without a model": (content(b"PK\x05\x06" + bytes(18)), ["pytorch_model.bin", "damaged"]),
    "a tensor alone": (state(torch.ones(2)), ["pytorch_model.bin", "Tensor"]),
    "a list": (state([torch.ones(2)]), ["pytorch_model.bin", "list"]),
    "no tensor": (state({}), ["pytorch_model.bin", "no tensor"]),
    "nested": (state({"model": {"a": torch.ones(2)}}), ["pytorch_model.bin", "'model'"]),
    "a number": (state({"step": 3}), ["pytorch_model.bin", "'step'"]),
    "a key that is no text": (state({3: torch.ones(2)}), ["pytorch_model.bin", "3"]),
    "a sparse tensor": (state({"a.weight": torch.eye(3).to_sparse()}), ["pytorch_model.bin", "'a.weight'"]),
    "a complex tensor": (state({"a.weight": torch.ones(2, dtype=torch.complex128)}), ["'a.weight'"]),
    "a meta tensor": (state({"a.weight": torch.ones(2, device="meta")}), ["'a.weight'"]),
    "no config.json": (config(None), ["config.json"]),
    "config.json not JSON": (config(b"{"), ["config.json", "JSON"]),
    "config.json a list": (config(b"[]"), ["config.json", "JSON"]),
    "config.json not UTF-8": (config(b'{"a": "\xff"}'), ["config.json", "JSON"]),
    "no weights": (lambda marker, folder: (folder / "pytorch_model.bin").unlink(), ["pytorch_model.bin", "neither"]),
    "safetensors already": (lambda marker, folder: (folder / "model.safetensors").touch(), ["already"]),
    "index not JSON": (index("{"), [INDEX, "JSON"]),
    "index empty": (index({}), [INDEX, "weight_map"]),
    "index a list": (index(["a"]), [INDEX, "weight_map"]),
    "index out of the folder": (index({"a": f"../model/{SHARDS[0]}"}), [INDEX, "'a'", "../model"]),
    "index with a number": (index({"a": 1}), [INDEX, "'a'"]),
    "missing shard": (index({"a": SHARDS[0], "b": SHARDS[1]}), [INDEX, "'b'", SHARDS[1], "missing"]),
    "tensor in two shards": (
        second_shard(lambda marker: {"a": torch.ones(2), "b": torch.ones(2)}),
        [SHARDS[1], "'a'", SHARDS[0]],
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch 2.11 warns of invariants that it does not check
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path, case: str) -> None:
    change, named = BAD[case]
    marker = tmp_path / "marker"
    source = bin_folder(tmp_path / "model", {"a": torch.ones(200)})
    change(marker, source)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidCheckpoint) as caught:
        convert(source)
    for text in [*named, str(source)]:
        assert text in str(caught.value)
    assert not marker.exists(), "a pickle ran"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_marker_would_appear_if_a_pickle_ran(tmp_path: Path) -> None:
    write_pickle(tmp_path / "marker", tmp_path)
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "marker").exists()


def test_only_a_free_destination_is_written(tmp_path: Path) -> None:
    source = bin_folder(tmp_path / "model", {"a": torch.ones(2)})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "keep").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for destination in (source, tmp_path / "taken", tmp_path / "file"):
        with pytest.raises(InvalidParameter, match=destination.name) as caught:
            convert(source, destination)
        assert caught.value.param == "destination"
    with pytest.raises(ModelError, match="cannot be written"):
        convert(source, tmp_path / "file" / "below")
    assert (tmp_path / "taken" / "keep").read_text() == (tmp_path / "file").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty").destination == tmp_path / "empty"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "model", "taken"]


def test_no_source(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for source in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(ModelNotFound, match=source.name):
            convert(source)


def test_no_shard_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="max_shard_bytes is 0"):
        convert(bin_folder(tmp_path / "model", {"a": torch.ones(2)}), max_shard_bytes=0)


def test_a_full_disk_and_an_interrupt_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bin_folder(tmp_path / "model", {"a": torch.ones(2), "b": torch.ones(2)})
    written: list[str] = []
    write = ShardFile.add

    def failing(error: BaseException) -> Callable[..., None]:
        def add(file: ShardFile, name: str, tensor: Tensor) -> None:
            write(file, name, tensor)
            written.append(name)
            if len(written) % 2 == 0:
                raise error

        return add

    failures: list[tuple[BaseException, type[BaseException]]] = [
        (OSError(28, "No space left on device"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ]
    for error, raised in failures:
        monkeypatch.setattr(ShardFile, "add", failing(error))
        with pytest.raises(raised):
            convert(source, max_shard_bytes=8)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert written == ["a", "b"] * 2


def test_a_disk_without_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bin_folder(tmp_path / "model", {"a": torch.ones(2)})
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelError, match="10 bytes free"):
        convert(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
