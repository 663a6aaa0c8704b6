"""The schemas of the JSON Schema Test Suite: every answer that ends is valid, every schema is held to or refused.

Run with the folder of a copy: `python -m tests.json_schema_suite DIR [draft] [seeds]`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidParameter

MAX_RUNNING = 32

VALIDATORS: dict[str, Any] = {
    "draft3": jsonschema.Draft3Validator,
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


async def outcome(engine: AsyncEngine, draft: str, schema: Any, seed: int) -> str:
    """Return `valid`, `length`, `refused`, `unknown` to the validator, or what is wrong with an answer."""
    settings = GenerationConfig(
        max_new_tokens=150,
        temperature=1.3,
        top_k=0,
        random_seed=seed,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    try:
        response = await engine.generate("Give me JSON.", settings)
    except InvalidParameter:
        return "refused"
    if response.finish_reason != "stop":
        return str(response.finish_reason)
    validator = VALIDATORS[draft](schema, format_checker=jsonschema.FormatChecker())
    try:
        validator.validate(json.loads(response.text))
    except re.error:
        return "unknown"  # ECMAScript's patterns have more than Python's
    except (ValueError, jsonschema.ValidationError) as error:
        return f"WRONG: {response.text!r} for {json.dumps(schema)}: {error}"
    return "valid"


async def main(folder: Path, draft: str = "draft2020-12", seeds: int = 2) -> int:
    schemas = [
        case["schema"]
        for file in sorted((folder / "tests" / draft).glob("*.json"))
        for case in json.loads(file.read_text(encoding="utf-8"))
    ]
    places = asyncio.Semaphore(MAX_RUNNING)

    async with AsyncEngine("tiny-chat", EngineConfig(device_type="cpu", max_batch_size=MAX_RUNNING)) as engine:

        async def one(schema: Any, seed: int) -> str:
            async with places:
                return await outcome(engine, draft, schema, seed)

        outcomes = Counter(await asyncio.gather(*(one(schema, seed) for schema in schemas for seed in range(seeds))))
    for what, count in outcomes.most_common():
        print(f"{count:6}  {what}")
    return int(any(what.startswith("WRONG") for what in outcomes) or not outcomes["valid"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    draft, seeds = [*sys.argv[2:], *["draft2020-12", "2"][len(sys.argv) - 2 :]]
    sys.exit(asyncio.run(main(Path(sys.argv[1]), draft, int(seeds))))
