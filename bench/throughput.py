"""Output tokens per second on fixed batches, beside transformers on the same model and prompts in the same run.

    python bench/throughput.py
    python bench/throughput.py --model FOLDER --work b1,b64 --against none --json result.json

b1 is compared with `model.generate`, larger batches with `model.generate_batch` (continuous batching). The two engines
take turns, and the figures are medians, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads import Work, static

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.locate import locate

Timed = Callable[[Work], float]
"""Runs a work to its end; seconds."""


class Ours:
    """asyncllm, driven from synchronous code by an event loop of its own."""

    def __init__(self, model: str) -> None:
        self._runner = asyncio.Runner()
        # The prompts repeat from run to run: without this, all but the first would be found in the cache.
        config = EngineConfig(enable_prefix_caching=False, max_batch_size=256)
        self.engine = AsyncEngine(model, config)
        self._runner.run(self.engine.start())

    def run(self, work: Work) -> float:
        return self._runner.run(self._run(work))

    async def _run(self, work: Work) -> float:
        config = GenerationConfig(max_new_tokens=work.new_tokens, ignore_eos=True)
        start = time.perf_counter()
        generations = [
            self.engine.generate(input_ids=prompt, gen_config=config, stream_response=False) for prompt in work.prompts
        ]
        for generation in generations:
            await generation.start()
        for generation in generations:
            response = await generation.response()
            assert response.generate_token_len == work.new_tokens, response.finish_reason
        return time.perf_counter() - start

    def close(self) -> None:
        self._runner.run(self.engine.close())
        self._runner.close()


class Transformers:
    """transformers on the same checkpoint, in float32 like asyncllm on a CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self._model = model.to(device).eval()
        self._torch = torch

    def run(self, work: Work) -> float:
        from transformers import GenerationConfig as HubGenerationConfig

        config = HubGenerationConfig(max_new_tokens=work.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        torch = self._torch
        start = time.perf_counter()
        if len(work.prompts) == 1:
            ids = torch.tensor(work.prompts, device=self._model.device)
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            generated = out.shape[1] - ids.shape[1]
        else:
            outputs = self._model.generate_batch(work.prompts, generation_config=config, progress_bar=False)
            generated = min(len(output.generated_tokens) for output in outputs.values())
            assert len(outputs) == len(work.prompts)
        assert generated == work.new_tokens, f"transformers gave {generated} tokens"
        return time.perf_counter() - start


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

    ours = Ours(arguments.model)
    theirs = Transformers(locate(arguments.model)) if arguments.against == "transformers" else None
    vocab_size = ours.engine.tokenizer.vocab_size
    results = []
    header = f"{'work':6} {'asyncllm tok/s':>15} {'step ms':>9}"
    print(header + (f" {'transformers tok/s':>19} {'ratio':>7}" if theirs else ""), flush=True)
    try:
        for name in arguments.work.split(","):
            work = static(int(name.removeprefix("b")), arguments.prompt_len, arguments.new_tokens, vocab_size)
            result = measure(work, ours.run, theirs.run if theirs else None, arguments.repeat)
            results.append(result)
            line = f"{work.name:6} {result['out_tok_s']:15,.0f} {result['step_ms']:9.2f}"
            if theirs:
                line += f" {result['transformers_out_tok_s']:19,.0f} {result['ratio']:7.2f}"
            print(line, flush=True)
    finally:
        ours.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(work: Work, ours: Timed, theirs: Timed | None, repeat: int) -> dict[str, Any]:
    """Time the work in turns after one warm-up each."""
    short = Work(work.name, work.prompts, min(8, work.new_tokens))
    runs: list[Timed] = [ours] if theirs is None else [ours, theirs]
    for run in runs:
        run(short)
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for index, run in enumerate(runs):
            seconds[index].append(run(work))
    total = statistics.median(seconds[0])
    result: dict[str, Any] = {
        "work": work.name,
        "total_s": round(total, 4),
        "out_tok_s": round(work.num_new / total, 1),
        "step_ms": round(1000 * total / work.new_tokens, 3),
    }
    if theirs is not None:
        other = statistics.median(seconds[1])
        result["transformers_out_tok_s"] = round(work.num_new / other, 1)
        result["ratio"] = round(other / total, 2)
    return result


if __name__ == "__main__":
    main()
