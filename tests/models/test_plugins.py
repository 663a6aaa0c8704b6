"""Families of other packages, found by their entry points."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.models.parity import Case, folder_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "family_plugin"

OPEN = """
import sys, torch
from pathlib import Path
from asyncllm.errors import ModelError
from asyncllm.models.registry import open_model
try:
    model = open_model(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
    print(type(model).__module__, type(model).__name__, model.config.qkv_bias)
except ModelError as error:
    print(error)
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


def opened(folder: Path, packages: Path) -> str:
    """What another process says of the model in `folder` with these packages installed."""
    paths = os.pathsep.join([str(packages), str(EXAMPLE.parents[1])])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", OPEN, folder], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_example_package(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of(Case("qwen2", "default")), folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("proj.bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["PlainQwenForCausalLM"]}))
    assert opened(folder, install(EXAMPLE, tmp_path / "packages")) == "plain_qwen PlainQwen False"
    assert "PlainQwenForCausalLM" in opened(folder, tmp_path / "none")
    broken = tmp_path / "broken"
    install(EXAMPLE, broken)
    (broken / "plain_qwen.py").write_text("import not_there")
    found = opened(folder, broken)
    assert "plain_qwen" in found
    assert "not_there" in found
