"""A server whose ranks are killed, as users start it: streams end with an error, it serves again by itself with the
adapters that it had, and when it is killed itself nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file

from tests.adapters import write_adapter
from tests.checkpoints import build_checkpoint
from tests.processes import ServerProcess
from tests.ranks.engines import ranks

pytestmark = pytest.mark.timeout(180)


def soon(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it holds."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_server_outlives_its_ranks_and_they_do_not_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint("llama", tmp_path / "tiny", vocab_size=320)
    shapes = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("q_proj.weight")
    }
    write_adapter(tmp_path / "adapters" / "late", shapes)
    (tmp_path / "keys").write_text("owner\n")
    options = ["--server-port", "0", "--device-type", "cpu", "--num-gpu-blocks", "200", "--tp", "2", "--max-loras", "1"]
    owned = [
        "--admin-key-file",
        str(tmp_path / "keys"),
        "--adapters-folder",
        str(tmp_path / "adapters"),
        "--max-restarts",
        "9",
    ]
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with ServerProcess(str(folder), *options, *owned) as server:
        url, pid = server.ready().url, server.process.pid
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        body = json.dumps({"lora_name": "late", "lora_path": "late"}).encode()
        headers = {"Authorization": "Bearer owner", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/load_lora_adapter", body, headers), timeout=60).close()

        def answers() -> list[str] | None:
            try:
                return [
                    client.completions.create(model=name, prompt="Hi", max_tokens=8, temperature=0).choices[0].text
                    for name in ("tiny", "late")
                ]
            except openai.InternalServerError as error:
                assert error.status_code == 503  # noqa: PT017 - it is asked again
                return None

        expected = answers()
        assert expected is not None
        assert expected[0] != expected[1]
        streams: list[Any] = [
            client.completions.create(
                model=name, prompt="Hi", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            for name in ("tiny", "late", "tiny")
        ]
        for stream in streams:
            next(stream)
        before = sorted(ranks(pid))
        os.kill(before[1], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError):
                list(stream)
        # And one of those that come, before its model is loaded.
        again = soon(lambda: [each for each in ranks(pid) if each not in before])
        os.kill(again[0], signal.SIGKILL)
        assert soon(answers) == expected
        watched = [os.pidfd_open(each) for each in ranks(pid)]
        assert len(watched) == 2
        server.process.kill()
        server.process.wait()
        for each in watched:
            soon(lambda each=each: _is_gone(each))
            os.close(each)
        client.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def _is_gone(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False
