"""Seconds from a cold process to the first token, phase by phase. The page cache is warm: a first run is not counted.

    python bench/startup.py --model FOLDER --repeat 5 --json result.json

Every run is a process of its own. All times but the phases' own begin where the process is started:

    python_s       the interpreter runs its first line
    import_s       `import asyncllm`, torch and the model's code (a duration)
    device_s       the device's context (a duration)
    load_s         the weights are read, on the device (a duration)
    pool_s         KV pool and state tables (a duration)
    capture_s      warm-up and graph capture (a duration; 0 without graphs)
    ready_s        `AsyncEngine.start` has returned
    first_token_s  the first token of a prompt of 64 ids has been read
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

KEYS = ("python_s", "import_s", "device_s", "load_s", "pool_s", "capture_s", "ready_s", "first_token_s")
PHASES = ("device", "load", "pool", "capture")

CHILD = """
import time
python = time.monotonic()
import asyncllm
from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
imported = time.monotonic()
import asyncio, json, sys

async def main(began, model, settings):
    engine = AsyncEngine(model, EngineConfig(**settings))
    await engine.start()
    ready = time.monotonic()
    ids = [3 + index % (engine.limits.vocab_size - 3) for index in range(64)]
    config = GenerationConfig(max_new_tokens=1, ignore_eos=True)
    response = await engine.generate(input_ids=ids, gen_config=config)
    first_token = time.monotonic()
    assert response.generate_token_len == 1, response
    limits = engine.limits
    await engine.close()
    return {
        "python_s": python - began,
        "asyncllm_s": imported - python,
        "ready_s": ready - began,
        "first_token_s": first_token - began,
        "phases": limits.start_seconds,
        "device": limits.device,
        "dtype": limits.dtype,
        "num_parameters": limits.num_parameters,
    }

print(json.dumps(asyncio.run(main(float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))))
"""


def run_once(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One start in a fresh process: every key of KEYS, and what was started."""
    # The monotonic clock is the machine's, so that two processes can read the same one.
    command = [sys.executable, "-c", CHILD, repr(time.monotonic()), model, json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    phases = found.pop("phases")
    found["import_s"] = found.pop("asyncllm_s") + phases["import"]
    for phase in PHASES:
        found[f"{phase}_s"] = phases.get(phase, 0.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-chat", help="folder, bundled name or hub id")
    parser.add_argument("--repeat", type=int, default=3, help="counted runs; the median counts")
    parser.add_argument("--engine", default="{}", metavar="JSON", help='EngineConfig, for example {"dtype": "float16"}')
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    settings = json.loads(arguments.engine)

    runs = []
    for number in tqdm(range(1 + arguments.repeat), desc=arguments.model, unit="start"):
        run = run_once(arguments.model, settings)
        if number:
            runs.append(run)
        tqdm.write(" ".join(f"{key} {run[key]:.2f}" for key in KEYS), file=sys.stderr)
    result = {
        "model": arguments.model,
        **{key: runs[0][key] for key in ("device", "dtype", "num_parameters")},
        "repeat": arguments.repeat,
        **{key: round(statistics.median(run[key] for run in runs), 3) for key in KEYS},
    }
    print(json.dumps(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
