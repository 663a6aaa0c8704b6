"""Every example runs, and is short enough to be read."""

from __future__ import annotations

import asyncio
import inspect
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

EXPECTED = {
    "agent": "4711 + 815 = 5526.",
    "async_generate": "stopped by its deadline",
    "stream_infer": "What is 17 + 25? -> ",
    "chat_session": "the fork has 3 turns, the conversation 2",
    "batch": "What is 15 + 25? ",
    "image_question": "What colour is the square? -> ",
    "image_over_http": "What shape is red? -> ",
    "openai_client": "['served'] at http://127.0.0.1:",
    "nearest_sentence": "What is 17 + 25? -> ",
    "passkey": "found 1 of 1 in 8213 tokens with rope_scaling_factor=2\nfound 0 of 1 in 8213 tokens without",
}

WITH_TINY_CHAT = {"agent", "passkey"}
"""Of the checkpoint with random weights half of all tokens end an answer, which is no way to write a call, and it has
learned nothing."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(example))["main"]
    bundled = example.stem in WITH_TINY_CHAT or example.stem.startswith("image_")
    result = main() if bundled else main(str(tiny_checkpoint))
    if inspect.iscoroutine(result):
        asyncio.run(result)
    assert EXPECTED[example.stem] in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60
