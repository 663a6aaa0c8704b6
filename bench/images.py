"""Requests with an image, inside the process: how many a second, how soon they answer, and what a text stream notices.

    python bench/images.py
    python bench/images.py --model FOLDER --sizes 448x448,1344x1008 --requests 500 --json FILE

Each request has one image of its own, of random colours, about 64 tokens of text, and an answer of 64 tokens. For each
size of images:

    requests_per_s  all requests at once
    ttft_ms         first token of a request alone, the median of several, of images of one size that were never seen
    stream_*_ms     gaps between the chunks of one streamed answer to a text, `alone` and while the requests pour in:
                    their median, 99th percentile and longest
    same_*          the same image asked again and again, one question after the other: times that the tower ran, the
                    first token of the first question, the median of the others', and that of a text of as many tokens
                    as an image's question adds, alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from engines import engine_config, generation_config
from PIL import Image
from table import emit
from tqdm import trange

from asyncllm import AsyncEngine
from asyncllm.agent.image_features import ImageFeatures

SIZES = "448x448,1344x1008"
NEW_TOKENS = 64
PROMPT_TOKENS = 64
ALONE = 5
SAME = 100
STREAM_SECONDS = 2.0


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of random colours, another for each seed."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


async def text_of(engine: AsyncEngine, count: int, seed: int) -> str:
    """Return a text of about so many tokens, another for each seed."""
    ids = np.random.default_rng(seed).integers(1000, engine.limits.vocab_size - 100, count)
    return str(await engine.decode([int(each) for each in ids])) if engine.limits.vocab_size > 2000 else f"{seed} " * 9


async def ttft(engine: AsyncEngine, prompt: Any) -> float:
    """Seconds until the first chunk of an answer with tokens. The rest of it is not waited for."""
    start = time.perf_counter()
    async for chunk in engine.generate(prompt, generation_config(NEW_TOKENS), do_preprocess=False):
        if chunk.token_ids:
            return time.perf_counter() - start
    raise RuntimeError("an answer ended without a token")


async def gaps_of(engine: AsyncEngine, text: str, stop: asyncio.Event, new_tokens: int) -> list[float]:
    """Seconds between the chunks of streamed answers of so many tokens, until `stop` is set."""
    gaps: list[float] = []
    while not stop.is_set():
        times = []
        async for chunk in engine.generate(text, generation_config(new_tokens), do_preprocess=False):
            if chunk.token_ids:
                times.append(time.perf_counter())
            if stop.is_set():
                break
        gaps += [after - before for before, after in pairwise(times)]
    return gaps


async def answer_all(engine: AsyncEngine, prompts: Sequence[Any]) -> float:
    """Seconds until all prompts, asked at once, have whole answers."""
    start = time.perf_counter()
    responses = await engine.batch_infer(prompts, generation_config(NEW_TOKENS), do_preprocess=False)
    seconds = time.perf_counter() - start
    assert isinstance(responses, list)
    assert all(response.generate_token_len == NEW_TOKENS for response in responses)
    return seconds


@contextmanager
def counted_encodings() -> Iterator[list[int]]:
    """Count the images that the tower is shown."""
    encode, counts = ImageFeatures._encoded, [0]

    def counting(self: ImageFeatures, images: Sequence[Any]) -> Any:
        counts[0] += len(images)
        return encode(self, images)

    ImageFeatures._encoded = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        ImageFeatures._encoded = encode  # type: ignore[method-assign]


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the largest, in milliseconds."""
    values = np.array(seconds) * 1e3
    return {
        f"{name}_p50_ms": round(float(np.median(values)), 2),
        f"{name}_p99_ms": round(float(np.percentile(values, 99)), 2),
        f"{name}_max_ms": round(float(values.max()), 2),
    }


async def measure_size(engine: AsyncEngine, width: int, height: int, requests: int, same: int) -> dict[str, Any]:
    """The figures of images of this size."""
    seeds = iter(range(width * 1_000_000, (width + 1) * 1_000_000))

    async def question() -> Any:
        seed = next(seeds)
        return await text_of(engine, PROMPT_TOKENS, seed), picture(seed, width, height)

    # What comes for the second time is captured, so it takes three to warm up.
    for _ in range(3):
        await ttft(engine, await question())
    alone = [await ttft(engine, await question()) for _ in range(ALONE)]
    figures: dict[str, Any] = {"ttft_ms": round(float(np.median(alone)) * 1e3, 2)}

    prompts = [await question() for _ in trange(requests, desc="images", leave=False)]
    seconds = await answer_all(engine, prompts)
    figures |= {"requests": requests, "requests_per_s": round(requests / seconds, 2)}

    text = await text_of(engine, PROMPT_TOKENS, 1)
    stop = asyncio.Event()
    stream = asyncio.create_task(gaps_of(engine, text, stop, 256))
    await asyncio.sleep(STREAM_SECONDS)
    stop.set()
    figures |= spread("stream_alone", await stream)
    prompts = [await question() for _ in trange(requests, desc="images", leave=False)]
    stop = asyncio.Event()
    stream = asyncio.create_task(gaps_of(engine, text, stop, 1024))
    await asyncio.sleep(STREAM_SECONDS / 4)
    seconds = await answer_all(engine, prompts)
    stop.set()
    figures |= spread("stream", await stream)
    figures["requests_per_s_beside_stream"] = round(requests / seconds, 2)

    image = picture(next(seeds), width, height)
    with counted_encodings() as counts:
        questions = [(await text_of(engine, PROMPT_TOKENS, seed), image) for seed in range(7, 7 + same)]
        times = [await ttft(engine, each) for each in questions]
    texts = [await ttft(engine, await text_of(engine, PROMPT_TOKENS, seed)) for seed in range(1007, 1007 + ALONE)]
    return figures | {
        "same_asked": same,
        "same_encodings": counts[0],
        "same_first_ttft_ms": round(times[0] * 1e3, 2),
        "same_ttft_ms": round(float(np.median(times[1:])) * 1e3, 2),
        "text_ttft_ms": round(float(np.median(texts)) * 1e3, 2),
    }


async def measure(engine: AsyncEngine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    async with engine:
        for width, height in parse_sizes(arguments.sizes):
            figures = await measure_size(engine, width, height, arguments.requests, arguments.same)
            results.append({"engine": "asyncllm", "work": f"images_{width}x{height}", **figures})
            emit(results[-1], arguments.json)
    return results


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """ "448x448,64x32" -> [(448, 448), (64, 32)], width and height of at least 1. Raises ValueError."""
    sizes = [(int(width), int(height)) for width, height in (each.split("x") for each in text.split(","))]
    if any(side < 1 for size in sizes for side in size):
        raise ValueError(f"sizes are WIDTHxHEIGHT,..., not {text!r}")
    return sizes


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """One row for each size."""
    keys = [key for key in results[0] if key not in ("engine", "work", "requests", "same_asked")]
    rows = [["work", *keys], ["---"] * (len(keys) + 1)]
    rows += [[result["work"], *(f"{result[key]:,}" for key in keys)] for result in results]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-vlm", help="folder, bundled name or hub id (default: %(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="WIDTHxHEIGHT,... of images (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=20, help="requests with images (default: %(default)s)")
    parser.add_argument("--same", type=int, default=SAME, help="questions about one image (default: %(default)s)")
    parser.add_argument("--config", default="{}", metavar="JSON", help="EngineConfig fields")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    config = engine_config(arguments.model, json.dumps({"enable_prefix_caching": True} | json.loads(arguments.config)))
    results = asyncio.run(measure(AsyncEngine(arguments.model, config), arguments))
    print(format_table(results))


if __name__ == "__main__":
    main()
