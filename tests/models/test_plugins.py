"""Families of other packages, found by their entry points."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.cli import main
from asyncllm.errors import ModelError
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mistral import Mistral
from asyncllm.models.module_map import MODULE_MAP
from asyncllm.models.plugins import load_plugins
from asyncllm.models.registry import described, families, register, register_all_or_nothing
from tests.models.parity import Case, Runner, folder_of, open_case, random_tokens
from tests.test_extending import MAP

EXAMPLE = Path(__file__).parents[2] / "examples" / "family_plugin"

OPEN = """
import importlib, sys, torch
from pathlib import Path
from asyncllm.errors import ModelError
from asyncllm.models.build import open_model
from asyncllm.models.registry import families
for packages in sys.argv[2:]:
    sys.path.insert(0, packages)
    importlib.invalidate_caches()
    families.cache_clear()
    try:
        model = open_model(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
        print(type(model).__module__, type(model).__name__, model.config.qkv_bias)
    except ModelError as error:
        print(error)
    sys.path.remove(packages)
"""


def install(source: Path, place: Path) -> Path:
    """Put a package's modules and dist-info where an installer does."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = project["project"]["name"].replace("-", "_"), project["project"]["version"]
    folder = place / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(source / f"{module}.py", place)
    return place


def opened(folder: Path, *packages: Path) -> list[str]:
    """What another process says of the model in `folder`, with each of these folders of packages in turn."""
    env = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, "-c", OPEN, folder, *packages]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def plain_qwen(folder: Path) -> Path:
    """A checkpoint of the example's class."""
    shutil.copytree(folder_of(Case("qwen2", "default")), folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("proj.bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["PlainQwenForCausalLM"]}))
    return folder


def test_the_example_package(tmp_path: Path) -> None:
    broken = install(EXAMPLE, tmp_path / "broken")
    (broken / "plain_qwen.py").write_text("import not_there")
    installed = install(EXAMPLE, tmp_path / "packages")
    unknown, failed, found = opened(plain_qwen(tmp_path / "model"), tmp_path / "none", broken, installed)
    assert "PlainQwenForCausalLM" in unknown
    assert "plain_qwen" in failed
    assert "not_there" in failed
    assert found == "plain_qwen PlainQwen False"


def test_a_module_map_replaces_layers(tmp_path: Path) -> None:
    """As halving the weights of their last product does; and a map that does not fit is refused, and leaves nothing."""
    case = Case("llama", "default")
    tokens = random_tokens(3)
    expected = copy.deepcopy(open_case(case))
    with torch.no_grad():
        for layer in expected.layers:
            layer.mlp.down.weight *= 0.5
            layer.mlp.down.bias *= 0.5

    def opened_here() -> DecoderLM:
        return open_model(folder_of(case), dtype=torch.float32, device=torch.device("cpu"))

    def logits(model: DecoderLM) -> torch.Tensor:
        runner = Runner(model, block_size=16)
        row = runner.row(tokens)
        runner.step((row, len(tokens)))
        return row.result

    file = tmp_path / "halved.py"
    file.write_text(MAP)
    assert MODULE_MAP == {}
    try:
        load_plugins([file])
        torch.testing.assert_close(logits(opened_here()), logits(expected))
        for name, message in (("layers.{i}.ffn", "no such layers"), ("layers.0.attn", "not from its class, Attention")):
            MODULE_MAP["LlamaForCausalLM", name] = MODULE_MAP["LlamaForCausalLM", "layers.{i}.mlp"]
            with pytest.raises(ModelError, match=message):
                opened_here()
            del MODULE_MAP["LlamaForCausalLM", name]
        (tmp_path / "broken.py").write_text(MAP.replace("LlamaFor", "OtherFor") + "raise OSError")
        with pytest.raises(ModelError, match="broken"):
            load_plugins([tmp_path / "broken.py"])
        assert list(MODULE_MAP) == [("LlamaForCausalLM", "layers.{i}.mlp")]
    finally:
        MODULE_MAP.clear()


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "asyncllm", *arguments], capture_output=True, text=True, check=False)


def test_a_file_that_commands_are_given(tmp_path: Path) -> None:
    folder, plugin = plain_qwen(tmp_path / "model"), EXAMPLE / "plain_qwen.py"
    answer = ("run", folder, "hi", "--max-new-tokens", "3", "--ignore-eos", "--device-type", "cpu", "--isolated")
    done = command(*answer, "--plugin", plugin)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr
    done = command("list", "--json", "--plugin", plugin, "--plugin", plugin)
    assert "PlainQwenForCausalLM" in json.loads(done.stdout)["architectures"]


def test_a_file_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import not_there")
    for name, why in (("broken.py", "not_there"), ("none.py", "No such file"), ("none.txt", "not a Python file")):
        assert main(["list", "--plugin", str(tmp_path / name)]) == 1
        said = capsys.readouterr().err
        assert name in said
        assert why in said


def test_what_fails_registers_nothing() -> None:
    before = dict(families()), dict(described())

    def enter() -> None:
        with register_all_or_nothing():
            register(NewForCausalLM="a new one")(type("New", (Mistral,), {}))
            register("LlamaForCausalLM")(type("Other", (Mistral,), {}))

    with pytest.raises(ValueError, match="LlamaForCausalLM is registered by"):
        enter()
    families.cache_clear()
    assert (dict(families()), dict(described())) == before
