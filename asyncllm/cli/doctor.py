"""`asyncllm doctor`: checks of this machine, each with advice."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError

__all__ = ["Check", "as_json", "as_text", "examine"]

Verdict = Literal["ok", "warn", "fail"]

FLOORS = {
    "torch": ("2.11", "older ones are not tested, and up to 2.5.1 loading a pickle can run code (CVE-2025-32434)"),
    "tokenizers": ("0.21", "encoding without holding the interpreter lock"),
    "safetensors": ("0.5", "reading weights"),
    "msgspec": ("0.19", "checking settings"),
    "jinja2": ("3.1.6", "before it, a chat template can leave its sandbox (CVE-2025-27516)"),
}
"""Package -> (lowest version, what goes wrong below it)."""

BUNDLED_MODEL = "tiny-chat"
LARGE_MODEL = 7_000_000_000
"""Parameters of a model large enough to use all cores."""

MIN_OPEN_FILES = 1024
MIN_FREE_MEMORY_GB = 1.0
MIN_FREE_DISK_GB = 1.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty if all is well, or if `found` says it."""


def examine(model: str | None = None) -> list[Check]:
    """Run all checks; with `model`, also of that checkpoint's folder. Takes seconds, because it runs the bundled
    model."""
    checks = [
        _python(),
        *(_package(name) for name in FLOORS),
        _triton(),
        _device(),
        _threads(),
        _memory(),
        _open_files(),
        _cache(),
    ]
    checks.append(_answers(BUNDLED_MODEL, "bundled model"))
    if model is not None:
        checks.append(_checkpoint(model))
    return checks


def as_text(checks: list[Check]) -> str:
    """Return one line per check, with advice below it, and a summary."""
    lines = []
    for check in checks:
        lines.append(f"[{check.verdict:^4}] {check.name}: {check.found}")
        if check.advice:
            lines.append(f"       -> {check.advice}")
    failed = sum(check.verdict == "fail" for check in checks)
    lines.append(f"{failed} of {len(checks)} checks failed." if failed else "Ready.")
    return "\n".join(lines)


def as_json(checks: list[Check]) -> str:
    """Return {"ok": bool, "checks": [...]}."""
    healthy = all(check.verdict != "fail" for check in checks)
    return msgspec.json.format(msgspec.json.encode({"ok": healthy, "checks": checks})).decode()


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check(name="python", verdict="ok", found=found)


def _package(name: str) -> Check:
    floor, why = FLOORS[name]
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, verdict="fail", found="not installed", advice=f"pip install '{name}>={floor}'")
    if _numbers(found) < _numbers(floor):
        return Check(name=name, verdict="fail", found=found, advice=f"pip install '{name}>={floor}': {why}.")
    return Check(name=name, verdict="ok", found=found)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version, for comparing."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _triton() -> Check:
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        needed = sys.platform == "linux"
        return Check(
            name="triton",
            verdict="warn" if needed else "ok",
            found="not installed",
            advice="GPU kernels need it: pip install 'triton>=3.6'." if needed else "",
        )
    return Check(name="triton", verdict="ok", found=found)


def _device() -> Check:
    """Check that torch loads, and uses the NVIDIA card if there is one."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(name="device", verdict="fail", found=f"torch does not load: {error}", advice="Reinstall torch.")
    if torch.cuda.is_available():
        return Check(
            name="device", verdict="ok", found=f"{torch.cuda.get_device_name()}, CUDA build {torch.version.cuda}"
        )
    found = f"CPU with {torch.get_num_threads()} threads"
    if Path("/dev/nvidia0").exists():
        return Check(
            name="device",
            verdict="warn",
            found=f"{found}, although there is an NVIDIA card",
            advice="This torch build cannot use the card: install one for your driver's CUDA version.",
        )
    return Check(name="device", verdict="ok", found=found)


def _threads() -> Check:
    """Report the threads of steps on the CPU, for a model large enough to use them all."""
    try:
        from asyncllm.agent.cpu_threads import choose_threads
    except (ImportError, OSError) as error:
        return Check(
            name="cpu threads", verdict="fail", found=f"torch does not load: {error}", advice="Reinstall torch."
        )
    choice = choose_threads(EngineConfig(), LARGE_MODEL)
    return Check(name="cpu threads", verdict="ok", found=f"{choice.threads} for a model of any size: {choice.why}")


def _memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return Check(name="memory", verdict="ok", found="not known on this system")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    advice = "" if free >= MIN_FREE_MEMORY_GB else "Close programs, or lower cache_max_entry_count and session_len."
    return Check(name="memory", verdict="warn" if advice else "ok", found=f"{free:.1f} GB free", advice=advice)


def _open_files() -> Check:
    if sys.platform == "win32":
        return Check(name="open files", verdict="ok", found="not limited")
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = "" if limit >= MIN_OPEN_FILES or limit < 0 else f"ulimit -n {MIN_OPEN_FILES}, or more when serving many."
    return Check(name="open files", verdict="warn" if advice else "ok", found=f"limit {limit}", advice=advice)


def _cache() -> Check:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 1e9
    found = f"{folder}, {free:.0f} GB free"
    if not os.access(existing, os.W_OK):
        advice = "It is not writable: set HF_HOME to a folder of yours."
        return Check(name="model cache", verdict="warn", found=found, advice=advice)
    advice = "" if free >= MIN_FREE_DISK_GB else "Free some space, or set HF_HOME to another disk."
    return Check(name="model cache", verdict="warn" if advice else "ok", found=found, advice=advice)


def _answers(model: str, name: str) -> Check:
    """Load a model and generate with it."""
    from asyncllm import GenerationConfig
    from asyncllm.pipeline import Pipeline

    def ask() -> str:
        began = time.perf_counter()
        with Pipeline(model) as pipe:
            loaded = time.perf_counter()
            pipe("What is 17 + 25?", GenerationConfig(max_new_tokens=8))
            return f"loads in {loaded - began:.1f} s, answers in {time.perf_counter() - loaded:.1f} s"

    return _attempt(name, ask, "Reinstall asyncllm.")


def _checkpoint(model: str) -> Check:
    from asyncllm.locate import locate

    def look() -> str:
        from asyncllm.models.loading.checkpoint import Checkpoint
        from asyncllm.models.registry import read_config
        from asyncllm.text.tokenizer import Tokenizer

        folder = locate(model)
        architecture = read_config(folder).architecture
        Tokenizer.from_folder(folder)
        return f"{architecture}, {Checkpoint.open(folder).num_bytes / 1e9:.2f} GB of weights in {folder}"

    return _attempt(f"model {model}", look)


def _attempt(name: str, action: Callable[[], str], advice: str = "") -> Check:
    """`advice`: what to do if it fails, where its error does not say so."""
    try:
        return Check(name=name, verdict="ok", found=action())
    except (AsyncLLMError, ImportError, OSError) as error:
        return Check(name=name, verdict="fail", found=f"{type(error).__name__}: {error}", advice=advice)
