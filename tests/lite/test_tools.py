"""The tools as they are called: from Python and as commands, and what they refuse, and leave behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import lite
from asyncllm.cli import main
from asyncllm.cli.lite import spelled_out
from asyncllm.config import LITE_TOOLS
from asyncllm.errors import AsyncLLMError, InvalidParameter, ModelError, UnsupportedFeature, UnsupportedModel
from asyncllm.lite.texts import read_texts, sequences
from asyncllm.locate import locate
from asyncllm.models.dbrx import Dbrx
from asyncllm.models.loading import output_folder
from asyncllm.pipeline import Pipeline
from tests.checkpoints import build_checkpoint
from tests.models.parity import random_tokens
from tests.quant.test_packed_weights import logits_of, open_cpu

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
TEXTS = [random_tokens(seed, 100) for seed in range(11)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llama", tmp_path_factory.mktemp("source"), mlp_bias=False, **SIZES)


def test_a_command_writes_a_checkpoint_that_answers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, folder = tmp_path / "texts.jsonl", tmp_path / "written"
    lines: list[object] = [{"text": f"The fox number {number} jumps over the dog." * 5} for number in range(15)]
    lines += [{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}, "A line that is a text."]
    texts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ["--calib-dataset", str(texts), "--work_dir", str(folder), "--w-group-size", "32", "--calib-seqlen", "64"]
    assert main(["lite", "auto_awq", str(source), "--search-scale", "False", *options]) == 0
    printed = capsys.readouterr().out
    assert "divergence" in printed
    assert f"written to {folder}" in printed
    with Pipeline(str(folder)) as pipe:
        assert pipe("What is 17 + 25?").finish_reason in ("stop", "length")
    assert {each.name for each in folder.iterdir()} == {each.name for each in source.iterdir()}
    assert main(["lite", "auto_awq", str(source), *options]) == 2
    assert "--work-dir" in capsys.readouterr().err
    assert main(["lite", "auto_awq", str(source), "--overwrite", "--calib-samples", "0", *options]) == 0
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_values_of_lmdeploy_s_flag() -> None:
    for value, spelled in (("False", "--no-search-scale"), ("true", "--search-scale")):
        for given in (["--search_scale", value], [f"--search-scale={value}"]):
            assert spelled_out(["lite", "auto_awq", *given, "--w-sym"]) == ["lite", "auto_awq", spelled, "--w-sym"]


def test_every_tool_has_its_options_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, tool in LITE_TOOLS.items():
        with pytest.raises(SystemExit):
            main(["lite", name, "--help"])
        text = capsys.readouterr().out
        for option in tool.options:
            assert f"--{option.replace('_', '-')}" in text
    assert lite.TOOLS.keys() == LITE_TOOLS.keys()


def test_what_inputs_look_like_is_written(source: Path, tmp_path: Path) -> None:
    file = lite.calibrate(source, str(tmp_path / "stats"), texts=TEXTS)
    found = load_file(file)
    modules = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    assert found.keys() == {f"model.layers.0.{each}.{kind}" for kind in ("absmax", "absmean") for each in modules}
    largest, mean = (found[f"model.layers.0.self_attn.q_proj.{kind}"] for kind in ("absmax", "absmean"))
    assert (largest > mean).all()
    assert (mean > 0).all()


def test_many_files_have_an_index(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder.write_shards, "__defaults__", (20_000,))
    lite.blocked_fp8(source, str(tmp_path / "written"))
    assert (tmp_path / "written" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "written").glob("*.safetensors"))) > 1
    before, after = logits_of(open_cpu(source)), logits_of(open_cpu(tmp_path / "written"))
    assert 1e-4 < (after - before).norm() / before.norm() < 0.3


def test_an_interrupt_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    lite.blocked_fp8(source, str(folder))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def interrupted(done: int, count: int) -> None:
        raise KeyboardInterrupt

    for tool in ("smooth_quant", "calibrate"):
        with pytest.raises(KeyboardInterrupt):
            lite.TOOLS[tool](source, str(folder), texts=TEXTS, overwrite=True, progress=interrupted)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert sorted(each.name for each in tmp_path.iterdir()) == [".written.unfinished", "written"]
    lite.smooth_quant(source, str(folder), texts=TEXTS, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["written"]


REFUSED: dict[str, tuple[str, dict[str, Any], type[AsyncLLMError], str]] = {
    "no file": ("auto_gptq", {"calib_dataset": "nowhere.txt"}, InvalidParameter, "is not a file"),
    "few": ("auto_awq", {"texts": [[5], [6]]}, InvalidParameter, "no text has two tokens"),
    "ids": ("auto_awq", {"texts": [[5, 100_000]]}, InvalidParameter, "text 1 cannot be used.*from 0 to"),
    "messages": ("auto_awq", {"texts": [[{"role": "nobody"}]]}, InvalidParameter, "text 1 cannot be used"),
    "bits": ("auto_awq", {"w_bits": 3}, UnsupportedFeature, "w_bits = 3"),
    "gptq bits": ("auto_gptq", {"w_bits": 3}, UnsupportedFeature, "w_bits = 3"),
    "group": ("auto_awq", {"w_group_size": 48}, InvalidParameter, "not a multiple of 32"),
    "divisor": (
        "auto_awq",
        {"w_group_size": 128, "texts": TEXTS},
        InvalidParameter,
        r"_proj\.weight.*does not divide 64",
    ),
    "type": ("smooth_quant", {"quant_dtype": "float8_e5m2"}, InvalidParameter, "quant_dtype"),
    "option": ("blocked_fp8", {"w_bits": 8}, InvalidParameter, "no option 'w_bits'"),
    "nothing": ("calibrate", {"calib_samples": 0}, InvalidParameter, "calib_samples"),
    "sources": ("calibrate", {"texts": TEXTS, "calib_dataset": "a.txt"}, InvalidParameter, "two sources"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_written(name: str, source: Path, tmp_path: Path) -> None:
    tool, options, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        lite.TOOLS[tool](source, str(tmp_path / "written"), **options)
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_quantized_are_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite.blocked_fp8(source, str(tmp_path / "fp8"))
    with pytest.raises(UnsupportedModel, match="quantized already"):
        lite.blocked_fp8(tmp_path / "fp8", str(tmp_path / "again"))
    stacked = build_checkpoint("dbrx", tmp_path / "dbrx")
    alone = "transformer.blocks.{i}.ffn.experts.mlp.{e}.v1"
    monkeypatch.setattr(Dbrx, "weights", Dbrx.weights.without(alone))
    with pytest.raises(UnsupportedModel, match=r"mlp\.v1.*no place"):
        lite.blocked_fp8(stacked, str(tmp_path / "again"))
    for family, tool in (("gemma4", "smooth_quant"), ("gemma4", "calibrate"), ("glm_moe_dsa", "smooth_quant")):
        sharing = build_checkpoint(family, tmp_path / family)
        with pytest.raises(UnsupportedModel, match=r"cannot run one at a time.*Use blocked_fp8"):
            lite.TOOLS[tool](sharing, str(tmp_path / "again"), texts=TEXTS)
    with pytest.raises(InvalidParameter, match="folder of the model"):
        lite.blocked_fp8(source, str(source), overwrite=True)
    with pytest.raises(ModelError):
        lite.blocked_fp8(tmp_path, str(tmp_path / "again"))


def test_texts_are_cut_and_always_in_the_same_order(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(f"Text {number}: " + "a b c d " * 60 for number in range(40)), encoding="utf-8")
    texts = read_texts(file)
    assert len(texts) == 40
    folder = locate("tiny-chat")
    found = sequences(folder, texts, samples=30, length=64)
    assert found == sequences(folder, texts, samples=30, length=64)
    assert max(map(len, found)) == 64
    assert 30 * 64 - 64 < sum(map(len, found)) <= 30 * 64
    for content, says in (('{"other": 1}', "line 1"), ("{", "line 1")):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content, encoding="utf-8")
        with pytest.raises(InvalidParameter, match=says):
            read_texts(bad)
    bundled = sequences(folder, read_texts(None), samples=128, length=2048)
    assert sum(map(len, bundled)) > 100_000


def test_data_sets_of_the_hub_by_lmdeploy_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    rows: dict[str, list[dict[str, Any]]] = {
        "Salesforce/wikitext": [{"text": f" line {number} \n" if number % 2 else ""} for number in range(300)],
        "allenai/c4": [{"text": "One.", "url": "a"}, {"text": "Two."}],
        "openai/gsm8k": [{"question": "1 + 1?", "answer": "2"}],
        "garage-bAInd/Open-Platypus": [{"instruction": "Add.", "input": "1, 1", "output": "2"}],
        "neuralmagic/LLM_compression_calibration": [{"messages": [{"role": "user", "content": "Hi"}]}],
        "mit-han-lab/pile-val-backup": [{"meta": {}}],
    }

    def load_dataset(repository: str, part: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((repository, part, split, streaming))
        if repository not in rows:
            raise ConnectionError("no route\nto it")
        return iter(rows[repository])

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    found = read_texts("wikitext2")
    assert [len(str(each).split("\n")) for each in found] == [64, 64, 22]
    assert read_texts("c4") == ["One.", "Two."]
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert read_texts("gsm8k") == [turns]
    assert read_texts("open-platypus") == [
        [{"role": "user", "content": "Add.\n1, 1"}, {"role": "assistant", "content": "2"}]
    ]
    assert read_texts("neuralmagic_calibration") == [[{"role": "user", "content": "Hi"}]]
    assert asked[0] == ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", True)
    with pytest.raises(InvalidParameter, match=r"no column.*file"):
        read_texts("pileval")
    with pytest.raises(InvalidParameter, match=r"ConnectionError: .*no route.*\.jsonl file"):
        read_texts("openwebtext")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidParameter, match="pip install datasets"):
        read_texts("ptb")


def test_a_model_in_16_bits_keeps_its_types(tmp_path: Path) -> None:
    source = build_checkpoint("llama", tmp_path / "source", mlp_bias=False, dtype=torch.bfloat16, **SIZES)
    options = {"w_group_size": 32, "checkpoint_format": "compressed-tensors"}
    report = lite.auto_awq(source, str(tmp_path / "written"), texts=TEXTS, **options)
    tensors = load_file(tmp_path / "written" / "model.safetensors")
    assert tensors["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].dtype == torch.bfloat16
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.comparison is not None
    assert 0 < report.comparison.divergence < 1
