"""The engines that are timed: asyncllm and transformers, each in a process of its own.

A process each, because OpenMP makes all teams of a process wait in the kernel once they have more threads than there
are cores, which triples the step of a small model on two cores, and because a GPU's memory goes to one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workloads import Work

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.locate import locate

__all__ = ["EngineProcess", "Timed", "engine_config", "generation_config", "open_ours", "open_transformers"]

Timed = Callable[[Work], float]
"""Runs a work to its end; seconds."""

SESSION_LEN = 8192


def engine_config(model: str, overrides: str = "{}") -> EngineConfig:
    """How asyncllm is set up to be timed; `overrides` is a JSON object of EngineConfig fields.

    At most 256 requests run, and prompts, which repeat from run to run, are not found in the prefix cache.
    """
    from asyncllm.models.registry import read_config

    limit = read_config(locate(model)).max_position
    fields: dict[str, Any] = {
        "max_batch_size": 256,
        "session_len": min(SESSION_LEN, limit),
        "cache_max_entry_count": 0.85,
        "enable_prefix_caching": False,
    }
    return EngineConfig.from_dict(fields | json.loads(overrides)).checked()


def generation_config(new_tokens: int, *, sampled: bool = False) -> GenerationConfig:
    """An answer of exactly `new_tokens` tokens."""
    if sampled:
        return GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, temperature=0.8, top_p=0.95, top_k=50)
    return GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, top_k=1)


async def answer(engine: AsyncEngine, work: Work) -> float:
    """Run all requests of `work` at once; seconds until the last has its whole answer."""
    configs = [generation_config(length, sampled=work.sampled) for length in work.new_tokens]
    start = time.perf_counter()
    responses = await engine.batch_infer(work.prompts, configs)
    seconds = time.perf_counter() - start
    assert [response.generate_token_len for response in responses] == work.new_tokens
    return seconds


@contextmanager
def open_ours(model: str, overrides: str = "{}") -> Iterator[Timed]:
    """asyncllm, driven from synchronous code by an event loop of its own."""
    engine = AsyncEngine(model, engine_config(model, overrides))
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield lambda work: runner.run(answer(engine, work))
        runner.run(engine.close())


@contextmanager
def open_transformers(model: str, dtype: str) -> Iterator[Timed]:
    """transformers on the same checkpoint, in the type that it loads by default ("auto") or in another.

    One request is answered by `model.generate`, more by `model.generate_batch` (continuous batching).
    """
    # In this folder is a kernels.py, which transformers would take for the hub library of that name.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

    import torch
    from transformers import AutoModelForCausalLM
    from transformers import GenerationConfig as HubGenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(locate(model), dtype=dtype, attn_implementation="sdpa")
    loaded = loaded.to(device).eval()

    def answer(work: Work) -> float:
        new_tokens = work.new_tokens[0]
        assert set(work.new_tokens) == {new_tokens}, "transformers is timed on answers of one length"
        config = HubGenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        if len(work.prompts) == 1:
            ids = torch.tensor(work.prompts, device=device)
            with torch.inference_mode():
                out = loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            lengths = [out.shape[1] - ids.shape[1]]
        else:
            outputs = loaded.generate_batch(work.prompts, generation_config=config, progress_bar=False)
            lengths = [len(output.generated_tokens) for output in outputs.values()]
        seconds = time.perf_counter() - start
        assert lengths == work.new_tokens, f"transformers gave {lengths} tokens"
        return seconds

    yield answer


def serve(
    open_engine: Callable[..., AbstractContextManager[Timed]], arguments: tuple[str, ...], connection: Connection
) -> None:
    """The main function of an engine's process: works in, seconds out; an exception is sent instead of seconds."""
    try:
        with open_engine(*arguments) as run:
            while (work := connection.recv()) is not None:
                connection.send(run(work))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, open_engine: Callable[..., AbstractContextManager[Timed]], *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(open_engine, arguments, other), daemon=True)
        self._process.start()
        other.close()

    def run(self, work: Work) -> float:
        """Seconds that the work took. Raises RuntimeError when the engine cannot run it."""
        self._connection.send(work)
        answer: float | str = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the engine's process ended: {answer}")
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            self._connection.send(None)
        self._process.join(timeout=30)
        self._connection.close()
