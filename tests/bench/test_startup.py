"""bench/startup.py on the bundled model, and what a start may not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_phases_of_a_start(tmp_path: Path) -> None:
    command = [sys.executable, "bench/startup.py", "--repeat", "1", "--json", str(tmp_path / "result.json")]
    command += ["--engine", '{"device_type": "cpu", "dtype": "bfloat16"}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (result["model"], result["device"], result["dtype"]) == ("tiny-chat", "cpu", "bfloat16")
    assert 0 < result["python_s"] < result["ready_s"] < result["first_token_s"]
    phases = [result[f"{phase}_s"] for phase in ("import", "device", "load", "pool", "capture")]
    assert min(phases) >= 0
    assert result["import_s"] > 0 < result["load_s"]
    assert sum(phases) < result["ready_s"]
    assert "first_token_s" in done.stderr


def test_a_start_imports_only_what_it_needs() -> None:
    program = (
        "import asyncio, sys\n"
        "from asyncllm import AsyncEngine, EngineConfig\n"
        "async def main():\n"
        "    async with AsyncEngine('tiny-chat', EngineConfig(device_type='cpu')):\n"
        "        pass\n"
        "asyncio.run(main())\n"
        "heavy = {'transformers', 'huggingface_hub', 'torch._dynamo', 'torch._inductor', 'sympy', 'pandas', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
