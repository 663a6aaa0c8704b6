"""Texts for `asyncllm lite`: conversations and stories as the bundled model is trained on, prose and code of this
repository. Prints them as JSON lines.

    python -m examples.train_tiny_chat.calibration > asyncllm/assets/calibration.jsonl
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .conversation import document

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = 620
ROOM = 900
PAGES = ("README.md", "DESIGN.md", "docs/library.md", "docs/design/engine.md", "docs/design/kernels.md")
FILES = ("asyncllm/engine/loop/engine_loop.py", "asyncllm/text/detokenizer.py", "asyncllm/kernels/rotary.py")
CHARACTERS = 2000
"""Of a piece of prose or code."""

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def texts() -> Iterator[dict[str, object]]:
    """Objects with "messages" or "text", the same in every run."""
    random = Random("calibration")
    for _ in range(DOCUMENTS):
        text = "".join(segment.text for segment in document(random, ROOM))
        turns = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
        yield {"messages": turns} if turns else {"text": re.sub(r"<\|\w+\|>", "", text)}
    for name in (*PAGES, *FILES):
        content = (ROOT / name).read_text(encoding="utf-8")
        for start in range(0, min(len(content), 8 * CHARACTERS), CHARACTERS):
            yield {"text": content[start : start + CHARACTERS]}


if __name__ == "__main__":
    for each in texts():
        print(json.dumps(each, ensure_ascii=False))
