"""Published checkpoints, of which `published.jsonl` has what can be known without their weights: entries of
config.json, names of tensors (or the record that has the same), how many parameters there are, and for how many
positions. Factors of long contexts are ones there. Each is read and planned as it would be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncllm.models.loading.load_plan import LoadPlan
from asyncllm.models.registry import families, read_config

_LINES = Path(__file__).with_name("published.jsonl").read_text(encoding="utf-8").splitlines()
RECORDS = {record["model"]: record for record in map(json.loads, _LINES)}


def names(pattern: str, layers: int, experts: int) -> list[str]:
    """The tensors of a name with {i} for every layer, and {e} for some of the experts: they have one row."""
    layered = [pattern.replace("{i}", str(layer)) for layer in range(layers if "{i}" in pattern else 1)]
    some = {0, 1, experts - 1} if "{e}" in pattern else {0}
    return [name.replace("{e}", str(expert)) for name in layered for expert in some]


@pytest.mark.parametrize("model_name", RECORDS)
def test_published_checkpoint(model_name: str, tmp_path: Path) -> None:
    """Its class reads the entries and has that many parameters; each tensor has a place or is left out knowingly, and
    nothing stays empty."""
    record = RECORDS[model_name]
    (tmp_path / "config.json").write_text(json.dumps(record["config"]), encoding="utf-8")
    config = read_config(tmp_path)
    assert config.max_position == record["positions"]
    with torch.device("meta"):
        model = families()[config.architecture](config)
    if record["parameters"]:
        assert sum(parameter.numel() for parameter in model.parameters()) == record["parameters"]
    count = config.experts.count if config.experts is not None else 0
    expected, table, filled = LoadPlan(model, model.weight_map).expected, model.weight_map, set()
    tensors = record["tensors"]
    while isinstance(tensors, str):
        tensors = RECORDS[tensors]["tensors"]
    for pattern in tensors:
        places = [table.resolve(name) for name in names(pattern, config.num_layers, count)]
        known = [place for place in places if place is not None]
        wholes = [place if place.stack is None else place.of_experts(count) for place in known]
        keys = {(place.module, key) for place in wholes for key in place.keys} & expected.keys()
        assert keys or not known, f"{pattern} has no place in any layer"
        filled |= keys
    empty = {
        (module, suffix, part)
        for module, (suffix, part, expert) in expected.keys() - filled
        if expert is None or expert in (0, 1, count - 1)
    }
    assert not empty
