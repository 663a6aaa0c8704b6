"""Output tokens per second on fixed batches, beside transformers on the same model and prompts in the same run.

    python bench/throughput.py
    python bench/throughput.py --model FOLDER --work b1,b64 --against none --json result.json

b1 is compared with `model.generate`, larger batches with `model.generate_batch` (continuous batching). The engines take
turns, and the figures are medians, so that a busy machine slows them alike. Each has a process of its own: OpenMP makes
all teams of a process wait in the kernel once they have more threads than there are cores, which triples the step of a
small model on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workloads import Work, static

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.locate import locate
from asyncllm.text.tokenizer import Tokenizer

Timed = Callable[[Work], float]
"""Runs a work to its end; seconds."""


@contextmanager
def open_ours(model: str) -> Iterator[Timed]:
    """asyncllm, driven from synchronous code by an event loop of its own."""
    # The prompts repeat from run to run: without this, all but the first would be found in the cache.
    engine = AsyncEngine(model, EngineConfig(enable_prefix_caching=False, max_batch_size=256))

    async def answer(work: Work) -> float:
        config = GenerationConfig(max_new_tokens=work.new_tokens, ignore_eos=True)
        start = time.perf_counter()
        generations = [
            engine.generate(input_ids=prompt, gen_config=config, stream_response=False) for prompt in work.prompts
        ]
        for generation in generations:
            await generation.start()
        for generation in generations:
            response = await generation.response()
            assert response.generate_token_len == work.new_tokens, response.finish_reason
        return time.perf_counter() - start

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield lambda work: runner.run(answer(work))
        runner.run(engine.close())


@contextmanager
def open_transformers(model: str, dtype: str) -> Iterator[Timed]:
    """transformers on the same checkpoint, in the type that it loads by default ("auto") or in another."""
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
        config = HubGenerationConfig(max_new_tokens=work.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
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
        assert lengths == [work.new_tokens] * len(work.prompts), f"transformers gave {lengths} tokens"
        return seconds

    yield answer


def serve(
    open_engine: Callable[..., AbstractContextManager[Timed]], arguments: tuple[str, ...], connection: Connection
) -> None:
    """The main function of an engine's process: works in, seconds out."""
    with open_engine(*arguments) as run:
        while (work := connection.recv()) is not None:
            connection.send(run(work))


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, open_engine: Callable[..., AbstractContextManager[Timed]], *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(open_engine, arguments, other), daemon=True)
        self._process.start()
        other.close()

    def run(self, work: Work) -> float:
        self._connection.send(work)
        seconds: float = self._connection.recv()
        return seconds

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id")
    parser.add_argument("--work", default="b1,b16,b64", help="comma-separated batch sizes, as b1,b16")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each; the median counts")
    parser.add_argument("--against", choices=["transformers", "none"], default="transformers")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    engines = {"asyncllm": EngineProcess(open_ours, arguments.model)}
    if arguments.against == "transformers":
        for dtype in ("auto", "float32"):
            engines[f"transformers {dtype}"] = EngineProcess(open_transformers, arguments.model, dtype)
    vocab_size = Tokenizer.from_folder(locate(arguments.model)).vocab_size
    results = []
    peers = list(engines)[1:]
    print(f"{'work':6}{'asyncllm tok/s':>16}{'step ms':>9}" + "".join(f"{name:>22}{'ratio':>7}" for name in peers))
    try:
        for name in arguments.work.split(","):
            work = static(int(name.removeprefix("b")), arguments.prompt_len, arguments.new_tokens, vocab_size)
            result = measure(work, {name: engine.run for name, engine in engines.items()}, arguments.repeat)
            results.append(result)
            line = f"{work.name:6}{result['out_tok_s']:16,.0f}{result['step_ms']:9.2f}"
            for peer in result["peers"].values():
                line += f"{peer['out_tok_s']:22,.0f}{peer['ratio']:7.2f}"
            print(line, flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(work: Work, runs: dict[str, Timed], repeat: int) -> dict[str, Any]:
    """Time the work in turns after one warm-up each. The first of `runs` is ours."""
    short = Work(work.name, work.prompts, min(8, work.new_tokens))
    for run in runs.values():
        run(short)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            seconds[name].append(run(work))
    totals = {name: statistics.median(values) for name, values in seconds.items()}
    ours, *peers = totals
    return {
        "work": work.name,
        "total_s": round(totals[ours], 4),
        "out_tok_s": round(work.num_new / totals[ours], 1),
        "step_ms": round(1000 * totals[ours] / work.new_tokens, 3),
        "peers": {
            name: {
                "out_tok_s": round(work.num_new / totals[name], 1),
                "ratio": round(totals[name] / totals[ours], 2),
            }
            for name in peers
        },
    }


if __name__ == "__main__":
    main()
