"""The number of threads that steps on a CPU get: chosen where no setting names one, and set for one thread alone."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncllm.agent import cpu_threads
from asyncllm.agent.cpu_threads import choose_threads, cpu_quota, set_threads
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.models.decoder import DecoderLM
from tests.models.parity import Case, open_case

LARGE = 7_000_000_000
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that simulates a machine where the number of threads is unset."""

    def make(cores: int = 8, *, host: int | None = None, load: float = 0.0, quota: float | None = None) -> None:
        for variable in cpu_threads.VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(cpu_threads, "_cores", lambda: cores)
        monkeypatch.setattr(cpu_threads, "_defaults", lambda: {torch.get_num_threads()})
        monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
        monkeypatch.setattr(cpu_threads, "_load", lambda: load)
        monkeypatch.setattr(cpu_threads.os, "cpu_count", lambda: host or cores)

    return make


@pytest.mark.parametrize(
    ("where", "parameters", "others", "threads"),
    [
        ({}, LARGE, 0, 8),
        ({}, 7_300_000, 0, 2),
        ({}, 650_000, 0, 1),
        ({"quota": 2.0}, LARGE, 0, 2),
        ({"quota": 2.9}, LARGE, 0, 2),
        ({"quota": 0.5}, LARGE, 0, 1),
        ({"quota": 64.0}, LARGE, 0, 8),
        ({"load": 5.0}, LARGE, 0, 3),
        ({"load": 7.9}, LARGE, 0, 1),
        ({"load": 300.0}, LARGE, 0, 1),
        ({"host": 64, "load": 20.0}, LARGE, 0, 8),
        ({"host": 64, "load": 60.0}, LARGE, 0, 4),
        ({}, LARGE, 1, 4),
        ({}, LARGE, 20, 1),
        ({"cores": 1}, LARGE, 0, 1),
        ({"cores": 2, "load": 1.2}, LARGE, 0, 1),
    ],
)
def test_chosen_by_cores_quota_load_and_size(
    machine: Callable[..., None], where: dict[str, float], parameters: int, others: int, threads: int
) -> None:
    machine(**where)
    choice = choose_threads(EngineConfig(), parameters, others=others)
    assert (choice.threads, choice.chosen) == (threads, True)
    assert "million parameters" in choice.why
    assert ("quota" in choice.why) == ("quota" in where)


def test_the_load_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.cycle([1, 3])
    monkeypatch.setattr(
        cpu_threads, "Path", lambda _: SimpleNamespace(read_text=lambda: f"9.0 9.0 9.0 {next(looks)}/80 1")
    )
    assert cpu_threads._load() == 1.0
    monkeypatch.setattr(cpu_threads, "Path", lambda _: Path("/nowhere"))
    monkeypatch.setattr(cpu_threads.os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert cpu_threads._load() == 2.5


def test_a_setting_comes_first(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(load=300.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(EngineConfig(cpu_threads=5), LARGE)[:2] == (5, "cpu_threads=5.")


@pytest.mark.parametrize("variable", cpu_threads.VARIABLES)
def test_what_the_environment_says_stays(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    machine(load=300.0)
    monkeypatch.setenv(variable, "3")
    choice = choose_threads(EngineConfig(), LARGE)
    assert choice == (torch.get_num_threads(), f"{variable}=3.", False)


def test_what_the_program_set_stays(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(load=300.0)
    monkeypatch.setattr(cpu_threads, "_defaults", lambda: {torch.get_num_threads() + 1})
    choice = choose_threads(EngineConfig(), LARGE)
    assert choice == (torch.get_num_threads(), "torch.set_num_threads was called.", False)


def in_thread(call: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def settled(model: DecoderLM, config: EngineConfig, device: torch.device = CPU) -> int:
    set_threads(config, model, device)
    return torch.get_num_threads()


def test_the_choice_is_for_the_calling_thread_alone(
    machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    model = open_case(Case("llama", "default"))
    here, later = torch.get_num_threads(), in_thread(torch.get_num_threads)
    asked = EngineConfig(cpu_threads=here + 2)
    machine()
    with caplog.at_level(logging.INFO, logger="asyncllm"):
        assert in_thread(lambda: settled(model, EngineConfig())) == 1
        assert in_thread(lambda: settled(model, asked)) == here + 2
        assert in_thread(lambda: settled(model, EngineConfig(), torch.device("cuda"))) == later
    assert torch.get_num_threads() == here
    assert in_thread(torch.get_num_threads) == later
    first, *_ = (record.getMessage() for record in caplog.records)
    assert first.startswith("Steps run on 1 CPU threads: 8 cores, a load of 0.0")


def test_a_number_for_a_model_on_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="computes on cuda") as caught:
        set_threads(EngineConfig(cpu_threads=2), open_case(Case("llama", "default")), torch.device("cuda"))
    assert caught.value.param == "cpu_threads"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("cpu_max", "cpu.max").replace("cfs", "cpu.cfs")).write_text(content)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b": {"cpu_max": "150000 100000\n"}}, 1.5),
        ("0::/a/b\n", {"a/b": {"cpu_max": "max 100000\n"}, "a": {"cpu_max": "200000 100000\n"}}, 2.0),
        ("0::/a\n", {"a": {"cpu_max": "400000 100000"}, "": {"cpu_max": "100000 100000"}}, 1.0),
        ("0::/a\n", {"a": {"cpu_max": "max 100000\n"}}, None),
        ("0::/../elsewhere\n", {"": {"cpu_max": "50000 100000\n"}}, 0.5),
        ("4:cpu,cpuacct:/d\n", {"cpu,cpuacct/d": {"cfs_quota_us": "300000\n", "cfs_period_us": "100000\n"}}, 3.0),
        ("4:cpu,cpuacct:/d\n", {"cpu": {"cfs_quota_us": "300000\n", "cfs_period_us": "100000\n"}}, 3.0),
        ("1:cpu:/\n", {"cpu": {"cfs_quota_us": "-1\n", "cfs_period_us": "100000\n"}}, None),
        ("1:cpu:/\n", {"cpu": {"cfs_quota_us": "5\n", "cfs_period_us": "0\n"}}, None),
        ("3:cpuset:/x\n", {"cpuset/x": {"cfs_quota_us": "1000\n", "cfs_period_us": "1000\n"}}, None),
        ("0::/a\n", {"a": {"cpu_max": "many of them\n"}}, None),
        ("nonsense\n", {}, None),
        ("", {}, None),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, dict[str, str]], quota: float | None
) -> None:
    write(tmp_path, membership=membership)
    for folder, contents in files.items():
        write(tmp_path / "root" / folder, **contents)
    assert cpu_quota(tmp_path / "membership", tmp_path / "root") == quota


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


def test_this_machine_has_an_answer() -> None:
    choice = choose_threads(EngineConfig(), LARGE)
    assert choice.threads >= 1
    assert torch.get_num_threads() in cpu_threads._defaults() or not choice.chosen
