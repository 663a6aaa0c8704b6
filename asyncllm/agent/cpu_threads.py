"""The number of threads of torch's operators on a CPU, for the thread that runs the steps.

Every operator ends in a barrier, so one thread that has to wait for a core stops all of them. Tokens per second on two
shared cores with 1 and 2 threads, at a load of 1.2 to 1.6 and of 3.3 to 5.3:

    load                          1.4           4
    parameters   threads            1       2       1      2
    7 M          1 request        177      19     103      9
                 16 requests    1,398     599     985     95
                 a prompt       4,111   1,252   3,474    899
    22 M         1 request         88      89      74      8
                 16 requests      606     845     394     15
                 a prompt       1,941   3,805   1,374    202
    97 M         1 request         30      31
                 16 requests      174     225
                 a prompt         427     767

Therefore steps use the cores that are idle, but no more than the model has work for. In torch's OpenMP builds (checked
in 2.13) the number belongs to the thread that sets it and to threads that use torch for the first time afterwards;
those get their original number back.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.models.decoder import DecoderLM

__all__ = ["ThreadChoice", "allowed_cores", "choose_threads", "cpu_quota", "set_threads"]

logger = logging.getLogger("asyncllm")

PARAMETERS_PER_THREAD = 4_000_000
"""With fewer, the parts of an operator take no longer than the barrier after them."""

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_SAMPLES, _SAMPLE_INTERVAL_S = 20, 0.005

_cpu_models: weakref.WeakSet[DecoderLM] = weakref.WeakSet()
"""Models of this process that compute on the CPU."""


class ThreadChoice(NamedTuple):
    """A number of threads, and the reason for it."""

    threads: int
    why: str
    chosen: bool
    """Whether the number was chosen here, rather than set before."""


def set_threads(config: EngineConfig, model: DecoderLM, device: torch.device) -> None:
    """Set and log the number of threads of the calling thread, which will run the steps of `model`. On a GPU there is
    nothing to set; raises InvalidParameter if `cpu_threads` asks for it."""
    if device.type != "cpu":
        if config.cpu_threads:
            raise InvalidParameter(
                f"cpu_threads is {config.cpu_threads}, and the model computes on {device}. Leave it at 0, or use "
                f"device_type='cpu'.",
                "cpu_threads",
            )
        return
    others = sum(each is not model for each in _cpu_models)
    _cpu_models.add(model)
    choice = choose_threads(config, model.config.num_parameters, others=others)
    if choice.chosen or config.cpu_threads:
        before = torch.get_num_threads()
        torch.set_num_threads(choice.threads)
        # New threads take the number that was set last, by any thread.
        restore = threading.Thread(target=torch.set_num_threads, args=(before,), name="asyncllm-threads")
        restore.start()
        restore.join()
    logger.info("Steps run on %d CPU threads: %s", choice.threads, choice.why)


def choose_threads(config: EngineConfig, num_parameters: int, *, others: int = 0) -> ThreadChoice:
    """Return the threads for a model of this size, next to `others` models that compute in this process."""
    if config.cpu_threads:
        return ThreadChoice(config.cpu_threads, f"cpu_threads={config.cpu_threads}.", False)
    for variable in VARIABLES:
        if os.environ.get(variable):
            return ThreadChoice(torch.get_num_threads(), f"{variable}={os.environ[variable]}.", False)
    present = torch.get_num_threads()
    if present not in _defaults():
        return ThreadChoice(present, "torch.set_num_threads was called.", False)
    cores, quota, allowed = _cores(), cpu_quota(), allowed_cores()
    busy = _load()
    idle = max(1, min(allowed, round((os.cpu_count() or cores) - busy)))
    useful = max(1, math.ceil(num_parameters / PARAMETERS_PER_THREAD))
    threads = min(max(1, idle // (1 + others)), useful)
    why = f"{cores} cores" if quota is None else f"{cores} cores, of which a quota allows {quota:.3g}"
    why += f", a load of {busy:.1f}" + (f", {others} more engines in this process" if others else "")
    return ThreadChoice(threads, f"{why}, and {num_parameters / 1e6:.1f} million parameters.", True)


def allowed_cores() -> int:
    """Return how many cores' worth of CPU time this process may use, at least one."""
    quota = cpu_quota()
    return _cores() if quota is None else min(_cores(), max(1, int(quota)))


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _defaults() -> set[int]:
    """Return the thread counts that torch may have chosen by itself: logical or physical cores."""
    logical = _cores()
    siblings = set()
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return {logical, max(1, logical // 2), os.cpu_count() or 1}
    return {logical, len(siblings) or max(1, logical // 2), os.cpu_count() or 1}


def _load() -> float:
    """Return how many other threads of this machine compute or wait for a core, averaged over a tenth of a second.

    Where the system does not report this, return the load average of the last minute, which may include finished
    work."""
    try:
        return sum(_num_runnable() for _ in range(_SAMPLES)) / _SAMPLES
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def _num_runnable() -> int:
    """Return how many other threads compute or wait for a core at the moment."""
    time.sleep(_SAMPLE_INTERVAL_S)
    running, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
    return int(running) - 1


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores' worth of CPU time that control groups, version 1 or 2, allow this process; None: no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for folder in _folders(line, root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(line: str, root: Path) -> Iterator[Path]:
    """Yield the folders of a group "id:controllers:/path" that limit its CPU time: its own and its ancestors'."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if controllers and "cpu" not in controllers.split(","):
        return
    for mount in (controllers, "cpu") if controllers else ("",):
        folder = root / mount / path.strip("/")
        # In a container the path may be the host's, and the limits that apply are at the mount point itself.
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root / mount))


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        # "max" and -1 mean no limit.
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
