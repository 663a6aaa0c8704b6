"""Print, as JSON, which of asyncllm's files one greedy streamed request to tiny-chat executes, in the library and over
HTTP, once all is started and a request like it has been answered.

    python -m tests.executed_files
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import asyncllm
from asyncllm.config import EngineConfig, GenerationConfig
from tests.server.serving import serving

ROOT = Path(asyncllm.__file__).parent
PREFIX = f"{ROOT}/"
CONFIG = EngineConfig(device_type="cpu")
BODY = {"messages": "What is 17 + 25?", "temperature": 0, "max_tokens": 8, "stream": True}


class Recorder:
    """Collects the files of all functions that begin or go on while it is active, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] | None = None
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: Any, event: str, argument: object) -> None:
        if self.files is not None and event == "call" and frame.f_code.co_filename.startswith(PREFIX):
            self.files.add(frame.f_code.co_filename.removeprefix(PREFIX))

    def begin(self) -> None:
        self.files = set()

    def end(self) -> list[str]:
        files, self.files = self.files, None
        return sorted(files or ())


async def in_library(recorder: Recorder) -> list[str]:
    config = GenerationConfig(max_new_tokens=8, temperature=0.0)
    async with asyncllm.AsyncEngine("tiny-chat", CONFIG) as engine:
        for record in (False, True):
            if record:
                recorder.begin()
            async for _ in engine.generate("What is 17 + 25?", config):
                pass
        return recorder.end()


async def over_http(recorder: Recorder) -> list[str]:
    async with serving(asyncllm.AsyncEngine("tiny-chat", CONFIG)) as server:
        for record in (False, True):
            if record:
                recorder.begin()
            async with server.http.post(f"{server.url}/v1/chat/completions", json=BODY) as response:
                assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        return recorder.end()


def main() -> None:
    recorder = Recorder()
    print(json.dumps({"library": asyncio.run(in_library(recorder)), "http": asyncio.run(over_http(recorder))}))


if __name__ == "__main__":
    main()
