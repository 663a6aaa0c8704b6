"""What LoRA adapters cost a decode step: batches whose rows have none, one or many, against the engine without any.

    python bench/adapters.py --model FOLDER [--batches 1,16,64] [--counts 0,1,8,64] [--rank 16] [--mix 1000]
        [--while-loading] [--json FILE]

Adapters have random factors in every projection of every layer, and are written to a folder that is removed. Two
engines take their turns, one without room for adapters, which gives `base`, and one that has them all; rows of a batch
have the adapters in rotation. 0 adapters in the second engine are rows without one beside which none runs. Steps are
timed as in bench/throughput.py: `ratio` is a step's time over the base's. `--mix` adds so many requests of mixed
lengths that have all adapters in rotation, whose `ratio` is of tokens per second. `--while-loading` adds streams during
which adapters are loaded, and how long the readers of one wait for its next token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engines import EngineProcess, Timed, engine_config, generation_config
from safetensors import safe_open
from safetensors.torch import save_file
from table import emit
from throughput import BUNDLED
from workloads import Plan, mixed, plan, record, static, token_ids

from asyncllm import AsyncEngine
from asyncllm.locate import locate
from asyncllm.text.tokenizer import Tokenizer

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

LOADED = 3
"""Adapters that are loaded while answers stream."""


def write_adapter(model: Path, folder: Path, rank: int) -> None:
    """Write an adapter of random factors for all projections of a checkpoint's layers, small enough to leave logits
    finite."""
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                module, _, suffix = name.rpartition(".")
                if suffix != "weight" or not module.endswith(MODULES):
                    continue
                out_size, in_size = weights.get_slice(name).get_shape()
                for factor, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
                    values = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
                    tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@contextmanager
def open_engine(model: str, overrides: str, adapters: str) -> Iterator[Timed]:
    """asyncllm with the adapters of a JSON object; row i of a work has the i-th of the names in its `adapters`."""
    paths = json.loads(adapters)
    settings = {**json.loads(overrides), **({"adapters": paths, "max_loras": len(paths)} if paths else {})}
    engine = AsyncEngine(model, engine_config(model, json.dumps(settings)))

    async def answer(work: Any) -> float:
        requests, names = work
        begun = time.perf_counter()
        calls = [
            engine.generate(
                input_ids=prompt,
                gen_config=generation_config(length),
                adapter_name=names[row % len(names)] if names else None,
                stream_response=False,
            ).response()
            for row, (prompt, length) in enumerate(zip(requests.prompts, requests.new_tokens, strict=True))
        ]
        responses = await asyncio.gather(*calls)
        assert [each.generate_token_len for each in responses] == requests.new_tokens
        return time.perf_counter() - begun

    async def gaps(work: Any) -> dict[str, float]:
        requests, folder = work
        streams = [
            engine.generate(input_ids=prompt, gen_config=generation_config(length))
            for prompt, length in zip(requests.prompts, requests.new_tokens, strict=True)
        ]
        others = [asyncio.create_task(stream.response()) for stream in streams[1:]]
        times: list[float] = []
        loading, begun, ended = None, 0.0, 0.0

        async def load() -> None:
            nonlocal begun, ended
            begun = time.perf_counter()
            for index in range(LOADED):
                await engine.load_adapter(f"late-{index}", folder)
            ended = time.perf_counter()

        async for chunk in streams[0]:
            times += [time.perf_counter()] * bool(chunk.token_ids)
            if loading is None and len(times) > len(requests.prompts[0]) // 4:
                loading = asyncio.create_task(load())
        await asyncio.gather(*others)
        assert loading is not None
        await loading
        between = [(1000 * (second - first), second) for first, second in itertools.pairwise(times)]
        during = [gap for gap, when in between if begun < when < ended]
        beside = [gap for gap, when in between if not begun < when < ended]
        return {
            "gap_ms": round(statistics.median(beside), 3),
            "longest_gap_ms": round(max(beside), 3),
            "gap_while_loading_ms": round(statistics.median(during or [0.0]), 3),
            "longest_gap_while_loading_ms": round(max(during or [0.0]), 3),
            "load_ms": round(1000 * (ended - begun) / LOADED, 1),
        }

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield lambda work: runner.run(gaps(work) if isinstance(work[1], str) else answer(work))
        runner.run(engine.close())


def measure_mix(run: Any, count: int, names: list[str], ids: range) -> dict[str, Any]:
    """Time requests of mixed lengths that have these adapters in rotation."""
    works = Plan("mix", whole=[mixed(count, ids=ids)])
    return record(works, "asyncllm", [], [run((works.whole[0], names))])


def measure(run: Any, batch: int, names: list[str], ids: range, options: argparse.Namespace) -> dict[str, Any]:
    """Time one batch of rows that have these adapters in rotation."""
    works = plan(f"b{batch}", prompt_len=options.prompt_len, new_tokens=options.new_tokens, ids=ids)
    run((static(batch, 16, 8, seed=99, ids=ids), names))
    first = [run((work, names)) for work in works.first]
    return record(works, "asyncllm", first, [run((work, names)) for work in works.whole[:2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED, help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--batches", default="1,16,64", help="numbers of rows")
    parser.add_argument("--counts", default="0,1,8,64", help="numbers of adapters; a batch has as many rows or more")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, help="tokens per prompt (default: as bench/throughput.py)")
    parser.add_argument("--new-tokens", type=int, default=129, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--mix", type=int, default=0, help="requests of mixed lengths (default: none)")
    parser.add_argument("--while-loading", action="store_true", help="load adapters while answers stream")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    options = parser.parse_args()
    batches, counts = ([int(each) for each in text.split(",")] for text in (options.batches, options.counts))
    path = Path(locate(options.model))
    ids = token_ids(Tokenizer.from_folder(path).vocab_size)
    with TemporaryDirectory() as name:
        folder = Path(name) / "adapter"
        write_adapter(path, folder, options.rank)
        names = [f"adapter-{index}" for index in range(max(counts))]
        base: dict[int, float] = {}
        for paths in ({}, dict.fromkeys(names, str(folder))):
            with closing(EngineProcess(open_engine, options.model, options.config, json.dumps(paths))) as process:
                if options.while_loading and paths:
                    work = static(max(batches[:-1] or batches), 64, options.new_tokens * 4, seed=9, ids=ids)
                    waits = process.run((work, str(folder)))
                    emit({"work": "while loading", **waits, "adapters": LOADED, "rank": options.rank}, options.json)
                for batch, count in itertools.product(batches, counts if paths else (0,)):
                    if count > batch:
                        continue
                    figures = measure(process.run, batch, names[:count], ids, options)
                    figures["engine"] = "with adapters" if paths else "base"
                    ratio = round(figures["step_ms"] / base.setdefault(batch, figures["step_ms"]), 3)
                    emit({**figures, "adapters": count, "rank": options.rank, "ratio": ratio}, options.json)
                if options.mix:
                    figures = measure_mix(process.run, options.mix, names if paths else [], ids)
                    figures["engine"] = "with adapters" if paths else "base"
                    ratio = round(figures["out_tok_s"] / base.setdefault(0, figures["out_tok_s"]), 3)
                    emit({**figures, "adapters": len(paths), "rank": options.rank, "ratio": ratio}, options.json)


if __name__ == "__main__":
    main()
