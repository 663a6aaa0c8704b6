"""Two real servers that register with a real distributor, each a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes import ServerProcess, free_port

SMALL = ("--num-gpu-blocks", "200", "--device-type", "cpu")
MESSAGES: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


class Cluster:
    """A distributor and its servers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.servers: dict[str, ServerProcess] = {}
        """By their addresses."""

    def states(self) -> dict[str, str]:
        return {url: node["state"] for url, node in ask(f"{self.url}/nodes/status").items()}

    def unfinished(self) -> dict[str, int]:
        return {url: node["unfinished"] for url, node in ask(f"{self.url}/nodes/status").items()}

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stream(self, client: openai.OpenAI, tokens: int) -> openai.Stream[Any]:
        answer: openai.Stream[Any] = client.chat.completions.create(
            model="tiny-chat", messages=MESSAGES, stream=True, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return answer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(free_port())
    port = found.url.rpartition(":")[2]
    with ExitStack() as running:
        distributor = ServerProcess("proxy", "--server-port", port, "--health-interval", "0.2")
        own = ["tiny-chat", "--server-port", "0", *SMALL, "--proxy-url", found.url]
        servers = [ServerProcess(*own) for _ in range(2)]
        for process in (distributor, *servers):
            running.enter_context(process)
        distributor.ready()
        for server in servers:
            found.servers[server.ready().url] = server
        wait_until(lambda: found.states() == dict.fromkeys(found.servers, "ready"))
        yield found


def test_openais_client_is_answered_by_both(cluster: Cluster) -> None:
    with cluster.openai() as client:
        assert [model.id for model in client.models.list()] == ["tiny-chat"]
        whole = client.chat.completions.create(model="tiny-chat", messages=MESSAGES)
        assert "42" in (whole.choices[0].message.content or "")
        text = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(model="tiny-chat", messages=MESSAGES, stream=True)
        )
        assert text == whole.choices[0].message.content
        with cluster.stream(client, 1500) as first, cluster.stream(client, 1500) as second:
            next(iter(first))
            next(iter(second))
            assert cluster.unfinished() == dict.fromkeys(cluster.servers, 1)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=MESSAGES)
        continued = client.responses.create(model="tiny-chat", input="Hi")
        for _ in range(3):
            continued = client.responses.create(model="tiny-chat", input="And?", previous_response_id=continued.id)
        assert client.responses.retrieve(continued.id).output == continued.output


def test_a_client_that_leaves_aborts_the_answer_in_the_engine(cluster: Cluster) -> None:
    def running() -> int:
        return sum(ask(f"{url}/health")["running"] for url in cluster.servers)

    wait_until(lambda: running() == 0)
    with cluster.openai() as client, cluster.stream(client, 1900) as answer:
        next(iter(answer))
        wait_until(lambda: running() == 1)
    left = time.monotonic()
    wait_until(lambda: running() == 0, 5)
    assert time.monotonic() - left < 5
    assert sum(cluster.unfinished().values()) == 0


def test_a_killed_server_breaks_its_streams_and_no_later_request(cluster: Cluster) -> None:
    with cluster.openai() as client:
        with cluster.stream(client, 1900) as answer:
            pieces = iter(answer)
            next(pieces)
            [killed] = [url for url, count in cluster.unfinished().items() if count]
            cluster.servers[killed].process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIError, match="broke off"):
                for _ in pieces:
                    pass
        for _ in range(6):
            client.completions.create(model="tiny-chat", prompt="Hi", max_tokens=2)
    wait_until(lambda: cluster.states()[killed] == "unreachable")
    # Started again on its port, it serves without anyone's doing.
    with ServerProcess("tiny-chat", "--server-port", killed.rpartition(":")[2], *SMALL) as again:
        again.ready()
        wait_until(lambda: cluster.states()[killed] == "ready")
    wait_until(lambda: cluster.states()[killed] == "unreachable")


def test_a_server_that_stops_leaves_the_list(cluster: Cluster) -> None:
    [alive] = [url for url, state in cluster.states().items() if state == "ready"]
    server = cluster.servers[alive]
    with cluster.openai() as client, cluster.stream(client, 60) as answer:
        pieces = iter(answer)
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: alive not in cluster.states())
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{cluster.url}/health/ready")
        refused.value.close()
        assert refused.value.code == 503
        *_, last = pieces
        assert last.choices[0].finish_reason == "length"
    assert server.end()[0] == 0


def test_lmdeploys_command_starts_one_without_torch_and_a_signal_ends_it(tmp_path: Path) -> None:
    documented = '--server_name 127.0.0.1 --server_port 0 --strategy "min_expected_latency"'
    program = ("asyncllm.serve.proxy.proxy",)
    with ServerProcess(*shlex.split(documented), "--state-folder", str(tmp_path), program=program) as process:
        process.ready()
        assert ask(f"{process.url}/health")["nodes"] == 0
        assert "torch" not in Path(f"/proc/{process.process.pid}/maps").read_text()
        assert process.end(signal.SIGTERM)[0] == 0
