"""The device context that is made while torch is imported, against a driver that records the calls."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import pytest

from asyncllm.agent.device import context
from asyncllm.agent.device.context import THREAD_NAME, context_meanwhile


class Driver:
    """libcuda: each call is recorded and answered with 0, or with what `answers` says."""

    def __init__(self, answers: dict[str, int] | None = None) -> None:
        self.answers = answers or {}
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            self.threads.add(threading.current_thread().name)
            return self.answers.get(name, 0)

        return call


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.mark.usefixtures("before_torch")
@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ({}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ({"cuInit": 100}, ["cuInit"]),
        ({"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
        ({"cuDevicePrimaryCtxRetain": 2}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
    ],
)
def test_a_thread_asks_the_driver(answers: dict[str, int], calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(answers)
    loaded: list[str] = []

    def load(name: str) -> Driver:
        loaded.append(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    with context_meanwhile():
        pass
    assert (loaded, driver.calls, driver.threads) == ([context.DRIVER], calls, {THREAD_NAME})
    assert not threads()


@pytest.mark.usefixtures("before_torch")
def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Driver:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with context_meanwhile():
        pass
    assert not threads()


@pytest.mark.usefixtures("before_torch")
def test_an_import_that_fails_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with pytest.raises(ImportError), context_meanwhile():
        raise ImportError("no torch")
    assert not threads()


def test_a_torch_that_is_there_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert torch.__name__ in sys.modules
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("nothing is to be loaded"))
    with context_meanwhile():
        assert not threads()
