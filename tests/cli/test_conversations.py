"""`asyncllm serve api_client` in a real terminal, with a real server."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, cast

import pytest

from asyncllm import APIClient, cli
from asyncllm.cli.conversations import ClientConversation
from tests.processes import ServerProcess, free_port
from tests.terminal import Terminal

SETTINGS = ["--server-port", "0", "--num-gpu-blocks", "200", "--device-type", "cpu", "--api-keys", "k"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model whose answers have no end: they run until the session is full, or somebody stops them."""
    from tests.checkpoints import build_checkpoint

    folder = tmp_path_factory.mktemp("models") / "endless"
    build_checkpoint("llama", folder, vocab_size=384, max_position_embeddings=8192)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "eos_token_id": [3], "do_sample": False}))
    with ServerProcess(str(folder), *SETTINGS) as server:
        yield server.ready()


def running(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"{server.url}/health") as response:
        sequences: int = json.load(response)["running"]
    return sequences


@pytest.mark.parametrize("options", [[], ["--session-id", "7"]], ids=["kept by the client", "kept by the server"])
def test_ctrl_c_stops_the_answer_and_not_the_program(server: ServerProcess, options: list[str]) -> None:
    terminal = Terminal("serve", "api_client", server.url, "--api-key", "k", *options)
    try:
        terminal.expect("endless at http.*\r\n> ")
        for text in ("hi", "and more"):
            terminal.type(f"{text}\n")
            terminal.expect(f"{text}\r\n.")
            terminal.type("\x03")
            terminal.expect(r"\(stopped\)\r\n> ")
            assert not terminal.shows("asyncllm: ", within=0)
        while running(server):
            time.sleep(0.02)
        terminal.type("/reset\n")
        terminal.expect(r"\(forgotten\)\r\n> ")
        terminal.type("exit\n")
        assert terminal.process.wait(timeout=20) == 0
    finally:
        terminal.close()


def test_a_server_that_refuses_or_is_not_there(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "api_client", server.url, "--api-key", "wrong"]) == 1
    assert "key is missing or wrong" in capsys.readouterr().err
    assert cli.main(["serve", "api_client", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "whether the server runs" in capsys.readouterr().err
    assert cli.main(["serve", "api_client", "nowhere"]) == 2
    assert "http://host:port" in capsys.readouterr().err


class FakeClient:
    """Answers every conversation with the same two pieces, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def chat_completions_v1(
        self, model: str, messages: list[dict[str, Any]], **fields: Any
    ) -> Iterator[dict[str, Any]]:
        self.asked.append(messages)
        for piece, reason in (("po", None), ("ng", "stop")):
            yield {"choices": [{"delta": {"content": piece}, "finish_reason": reason}]}


def test_the_messages_are_kept_here_and_a_stopped_answer_as_far_as_it_came() -> None:
    client = FakeClient()
    conversation = ClientConversation(cast(APIClient, client), "fake")
    assert "".join(piece.text for piece in conversation.answer("ping")) == "pong"
    stopped = conversation.answer("again")
    next(stopped)
    stopped.close()
    list(conversation.answer("more"))
    assert [message["content"] for message in client.asked[-1]] == ["ping", "pong", "again", "po", "more"]
    assert [message["role"] for message in client.asked[-1]] == ["user", "assistant"] * 2 + ["user"]
    conversation.forget()
    list(conversation.answer("anew"))
    assert [message["content"] for message in client.asked[-1]] == ["anew"]
