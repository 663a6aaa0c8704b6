"""An agent sleeps, wakes and takes new weights; what fails leaves them as they were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm.agent import sleep
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.agent.open_model import OpenedModel
from asyncllm.agent.sleep import ModelPlacement
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter, ModelError, ModelNotFound
from asyncllm.protocol import Sleep, UpdateWeights, Wake
from tests.agent.tiny_model import Driver, plain_greedy, prompt_of, tiny_llama
from tests.checkpoints import build_checkpoint
from tests.ranks.threads import ThreadGroup, in_ranks

EVERYTHING = Wake(frozenset({"weights", "kv_cache"}))
WEIGHTS, CACHE = Wake(frozenset({"weights"})), Wake(frozenset({"kv_cache"}))
PROMPT = prompt_of(19)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("llama")
    return [build_checkpoint("llama", root / str(seed), seed=seed) for seed in (0, 1)]


def open_agent(folder: Path, **fields: Any) -> ModelAgent:
    settings = {"device_type": "cpu", "block_size": 4, "num_gpu_blocks": 40, "max_batch_size": 4, **fields}
    return ModelAgent(EngineConfig(**settings).checked(), folder)


def answer(agent: ModelAgent) -> list[int]:
    return Driver(agent).generate(0, PROMPT, 12)


def answer_of(folder: Path) -> list[int]:
    agent = open_agent(folder)
    expected = plain_greedy(agent.model, PROMPT, 12)
    assert answer(agent) == expected
    return expected


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_cpu_blocks", [0, 10])
def test_a_sleeper_holds_no_cache_and_answers_as_before(folders: list[Path], level: int, num_cpu_blocks: int) -> None:
    agent = open_agent(folders[0], num_cpu_blocks=num_cpu_blocks)
    expected = answer(agent)
    for _ in range(2):
        agent.carry_out(Sleep(level))
        agent.carry_out(Sleep(level))
        assert not agent._pool
        assert not agent._tables.caches
        assert all(parameter.is_meta == (level == 2) for parameter in agent.model.parameters())
        agent.carry_out(EVERYTHING)
        agent.carry_out(EVERYTHING)
        assert answer(agent) == expected
    assert (agent._swaps is not None) == bool(num_cpu_blocks)


def test_graphs_are_captured_again(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the addresses of what has gone."""
    made: list[object] = []
    agent = ModelAgent(EngineConfig(device_type="cpu", num_gpu_blocks=8, max_batch_size=2).checked(), folders[0])
    monkeypatch.setattr(agent, "_capture", lambda: made.append(object()) or made[-1])
    agent.carry_out(Sleep(1))
    assert agent._graphs is None
    agent.carry_out(WEIGHTS)
    assert not made
    agent.carry_out(CACHE)
    assert agent._graphs is made[0]


def test_new_weights_are_in_place_and_answer_as_their_own_checkpoint(folders: list[Path]) -> None:
    expected = answer_of(folders[1])
    agent = open_agent(folders[0])
    assert answer(agent) != expected
    addresses = [parameter.data_ptr() for parameter in agent.model.parameters()]
    agent.carry_out(UpdateWeights(tensors_of(folders[1])))
    assert [parameter.data_ptr() for parameter in agent.model.parameters()] == addresses
    assert answer(agent) == expected


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("woken", [True, False], ids=["weights awake", "all asleep"])
def test_new_weights_while_asleep(folders: list[Path], level: int, woken: bool) -> None:
    expected = answer_of(folders[1])
    agent = open_agent(folders[0])
    agent.carry_out(Sleep(level))
    if woken:
        agent.carry_out(WEIGHTS)
    agent.carry_out(UpdateWeights(tensors_of(folders[1])))
    agent.carry_out(CACHE if woken or level == 2 else EVERYTHING)
    assert answer(agent) == expected
    agent.carry_out(Sleep(1))
    agent.carry_out(EVERYTHING)
    assert answer(agent) == expected


def test_lost_weights_take_no_part_of_new_ones(folders: list[Path]) -> None:
    agent = open_agent(folders[0])
    expected = answer(agent)
    agent.carry_out(Sleep(2))
    some = dict(list(tensors_of(folders[1]).items())[:3])
    with pytest.raises(InvalidParameter, match="Pass all of them, or wake the model first"):
        agent.carry_out(UpdateWeights(some))
    assert all(parameter.is_meta for parameter in agent.model.parameters())
    agent.carry_out(EVERYTHING)
    assert answer(agent) == expected


def test_the_cache_wakes_after_the_weights(folders: list[Path]) -> None:
    agent = open_agent(folders[0])
    expected = answer(agent)
    agent.carry_out(Sleep(1))
    with pytest.raises(InvalidParameter, match="Wake 'weights' first, or both") as caught:
        agent.carry_out(CACHE)
    assert caught.value.param == "tags"
    agent.carry_out(WEIGHTS)
    agent.carry_out(CACHE)
    assert answer(agent) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_no_room_for_the_cache_lets_it_sleep_on(
    folders: list[Path], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = open_agent(folders[0])
    expected = answer(agent)
    agent.carry_out(Sleep(level))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("says the test")

    module = type(agent).__module__
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.allocate_pool", fail)
        with pytest.raises(ModelError, match="no memory left for the KV cache"):
            agent.carry_out(EVERYTHING)
    assert not agent._pool
    assert all(parameter.is_meta == (level == 2) for parameter in agent.model.parameters())
    with pytest.raises(InvalidParameter, match="Wake 'weights' first"):
        agent.carry_out(CACHE)
    agent.carry_out(EVERYTHING)
    assert answer(agent) == expected


def test_no_room_for_weights_lets_it_sleep_on(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = open_agent(folders[0])
    expected = answer(agent)
    agent.carry_out(Sleep(2))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("says the test")

    for command in (EVERYTHING, UpdateWeights(tensors_of(folders[1]))):
        with monkeypatch.context() as patch:
            patch.setattr(agent.model, "allocate", fail)
            with pytest.raises(ModelError, match="no memory left for the weights"):
                agent.carry_out(command)
        assert all(parameter.is_meta for parameter in agent.model.parameters())
    agent.carry_out(EVERYTHING)
    assert answer(agent) == expected


def test_a_checkpoint_that_has_gone(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "model")
    agent = open_agent(tmp_path / "model")
    agent.carry_out(Sleep(2))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ModelNotFound):
        agent.carry_out(EVERYTHING)
    agent.carry_out(UpdateWeights(tensors_of(folders[0])))
    agent.carry_out(EVERYTHING)
    assert answer(agent) == plain_greedy(agent.model, PROMPT, 12)


class Holder:
    """An agent without a cache, whose graphs have sums of ranks in them."""

    def __init__(self, group: ThreadGroup | None = None) -> None:
        self._group = group
        self.captured = self.cached = False

    def allocate_cache(self) -> None:
        if self._group is not None and self._group.rank == 1 and not self.cached:
            self.cached = True
            raise torch.OutOfMemoryError("says the test, the first time")
        self.cached = True

    def capture(self) -> None:
        assert self.cached
        self.captured = True
        if self._group is not None:
            self._group.all_reduce_min(1)

    def release_cache(self) -> None:
        pass


def test_ranks_wake_together_or_sleep_on(folders: list[Path]) -> None:
    """The second rank finds no memory for its cache, and no weights in a folder that it alone does not see."""

    def wake(group: ThreadGroup) -> list[str]:
        model, said = open_agent(folders[0]).model, []
        folder = Path("gone") if group.rank == 1 else folders[0]
        opened = OpenedModel(model, torch.device("cpu"), torch.float32, model.cache_specs, 1, folder, group)
        placed, holder = ModelPlacement(opened, EngineConfig()), Holder(group)
        for level, part in ((1, EVERYTHING), (2, WEIGHTS)):
            placed.carry_out(Sleep(level), holder)
            with pytest.raises(ModelError) as caught:
                placed.carry_out(part, holder)
            said.append(type(caught.value).__name__)
            assert not holder.captured
            assert any(parameter.is_meta for parameter in model.parameters()) == (level == 2)
            if level == 1:
                placed.carry_out(EVERYTHING, holder)
                assert holder.captured
                holder.captured = False
        return said

    assert in_ranks(2, wake) == [["OtherRankRefused", "OtherRankRefused"], ["ModelError", "ModelNotFound"]]


def test_weights_leave_their_device_only_if_the_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's device without memory in the place of a GPU."""
    model, meta = tiny_llama(), torch.device("meta")
    opened = OpenedModel(model, meta, torch.float32, model.cache_specs, 1, Path("tiny"))
    placed = ModelPlacement(opened, EngineConfig())
    with monkeypatch.context() as patch:
        patch.setattr(sleep, "available_memory", lambda device: 1000)
        with pytest.raises(ModelError, match=r"0 MiB are free\. Free some, or use sleep\(level=2\)"):
            placed.carry_out(Sleep(1), Holder())
    placed.carry_out(Sleep(1), Holder())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    placed.carry_out(EVERYTHING, Holder())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.embed.weight.is_meta, "what the forward pass reads is the new one"
