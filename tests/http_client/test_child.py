"""asyncllm.serve(): a server that lives as long as its client."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncllm
from asyncllm import APIClient, EngineConfig, EngineError, InvalidParameter, ModelNotFound, ServerUnreachable
from asyncllm.http_client import child

ROOT = Path(__file__).parent.parent.parent
SMALL = EngineConfig(num_gpu_blocks=200, device_type="cpu")

PARENT = """
import sys, asyncllm
client = asyncllm.serve(sys.argv[1], server_port=0, backend_config=asyncllm.EngineConfig(device_type="cpu"))
print(client.api_server_url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client(tiny_checkpoint: Path) -> Iterator[APIClient]:
    with asyncllm.serve(
        str(tiny_checkpoint), "named", "turbomind", SMALL, server_port=0, api_keys="secret", max_choices=1
    ) as client:
        yield client


def wait_until_gone(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) != 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"Something still listens on {url}.")


def test_it_answers_until_it_is_closed(client: APIClient) -> None:
    assert client.available_models == ["named"]
    [answer] = client.chat_completions_v1("named", "hi", max_tokens=3)
    assert answer["usage"]["completion_tokens"] <= 3
    with pytest.raises(asyncllm.ServerError, match="n is 2"):
        list(client.chat_completions_v1("named", "hi", n=2))
    running = client.chat_completions_v1("named", "hi", stream=True, max_tokens=7000, ignore_eos=True)
    next(running)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10  # and not the time that the answer would take
    with pytest.raises(ServerUnreachable):
        list(running)
    with pytest.raises(ServerUnreachable):
        _ = client.available_models
    client.close()


def test_forgetting_the_client_ends_the_server(tiny_checkpoint: Path) -> None:
    client = asyncllm.serve(str(tiny_checkpoint), server_port=0, backend_config=SMALL)
    url = client.api_server_url
    del client
    gc.collect()
    wait_until_gone(url)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_the_server_ends_with_its_parent(number: int | None, tiny_checkpoint: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_checkpoint)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        url = parent.stdout.readline().strip()
        assert asyncllm.client(url).available_models == ["tiny"]
        if number is None:
            parent.communicate()
        else:
            parent.send_signal(number)
        wait_until_gone(url)
        if number is None:
            assert parent.returncode == 0


def test_errors_of_the_start_are_raised_here(tiny_checkpoint: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        asyncllm.serve("./nowhere", server_port=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidParameter, match="Cannot listen") as caught:
            asyncllm.serve(str(tiny_checkpoint), server_port=taken.getsockname()[1])
    assert caught.value.param == "server_port"


def test_settings_are_checked_before_anything_starts() -> None:
    with pytest.raises(InvalidParameter, match="colour"):
        asyncllm.serve("tiny-chat", colour="red")
    with pytest.raises(InvalidParameter, match="backend"):
        asyncllm.serve("tiny-chat", backend="other")
    with pytest.raises(InvalidParameter, match="capability"):
        asyncllm.serve("tiny-chat", chat_template_config=asyncllm.ChatTemplateConfig(capability="fly"))  # type: ignore[arg-type]


def test_a_process_that_dies_is_an_error(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PROGRAM", "import os; os._exit(7)  # {path}")
    with pytest.raises(EngineError, match="status 7"):
        asyncllm.serve(str(tiny_checkpoint), server_port=0)


def test_https_by_its_own_certificate(tiny_checkpoint: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=example.org"]
    try:
        subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    files = {"ssl": True, "ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with asyncllm.serve(str(tiny_checkpoint), server_port=0, backend_config=SMALL, **files) as client:
        assert client.api_server_url.startswith("https://")
        assert client.available_models == ["tiny"]
        with pytest.raises(ServerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            _ = asyncllm.client(client.api_server_url).available_models
