"""LMDeploy's node routes: bodies and answers are its own, errors have a status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from asyncllm.config import DistributorConfig
from asyncllm.errors import InvalidParameter
from asyncllm.server.distributor.distributor import open_distributor
from asyncllm.server.distributor.nodes import State
from tests.processes import free_port
from tests.server.distributor.fakes import CHAT, FakeNode, distributing
from tests.server.raw import until

pytestmark = pytest.mark.anyio


async def test_a_node_is_added_described_and_removed() -> None:
    async with FakeNode() as node, distributing() as served:
        status = {"role": 1, "models": ["m"], "unfinished": 0, "latency": [0.5], "speed": 20}
        assert await served.post("/nodes/add", {"url": f"{node.url}/v1/", "status": status}) == (
            200,
            "Added successfully",
        )
        assert await served.names(1) == ["one"]
        [(url, found)] = (await served.get("/nodes/status"))[1].items()
        assert url == node.url
        assert found["latency"][0] == 0.5
        assert len(found.pop("latency")) == 2
        assert found == {"role": 1, "models": ["m"], "unfinished": 0, "speed": 20.0, "state": "ready"}
        # Added again without a status, as by its owner after a restart, it keeps what is known.
        assert (await served.post("/nodes/add", {"url": node.url}))[0] == 200
        assert served.node(node).speed == 20.0
        assert (await served.post("/nodes/add", {"url": node.url, "status": {"speed": -1}}))[0] == 200
        assert served.node(node).speed is None
        assert await served.post("/nodes/remove", {"url": node.url}) == (200, "Deleted successfully")
        assert await served.get("/nodes/status") == (200, {})
        assert (await served.post("/nodes/add", {"url": node.url}))[0] == 200
        assert await served.post(f"/nodes/remove?node_url={node.url}") == (200, "Deleted successfully")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/nodes/add", {"url": "nothing"}, 400, "invalid_value"),
        ("/nodes/add", {"url": "ftp://host"}, 400, "invalid_value"),
        ("/nodes/add", {"url": "http://user:pass@host"}, 400, "invalid_value"),
        ("/nodes/add", {"address": "http://host"}, 400, "invalid_value"),
        ("/nodes/add", {"url": "http://host", "status": {"role": "Prefill"}}, 400, "invalid_value"),
        ("/nodes/add", {"url": "http://host", "status": {"unfinished": 3}}, 400, "invalid_value"),
        ("/nodes/add", {"url": f"http://127.0.0.1:{free_port()}"}, 400, "node_unreachable"),
        ("/nodes/remove", {"url": "http://host"}, 404, "node_not_found"),
        ("/nodes/terminate", {"url": "http://host"}, 404, "node_not_found"),
        ("/nodes/start", {"url": "http://host"}, 404, "unknown_route"),
        ("/sleep", {"level": 1}, 404, "not_distributed"),
    ],
)
async def test_what_is_refused(path: str, body: Any, status: int, code: str) -> None:
    async with distributing() as served:
        number, answer = await served.post(path, body)
        assert (number, answer["error"]["code"]) == (status, code)
        assert await served.get("/nodes/status") == (200, {})


async def test_nodes_are_stopped_by_their_own_route() -> None:
    nodes = [FakeNode(str(number)) for number in range(3)]

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async with distributing(*nodes) as served:
        assert await served.post("/nodes/terminate", {"url": nodes[0].url}) == (200, "Deleted successfully")
        assert [path for _, path, _, _ in nodes[0].requests] == ["/terminate"]
        nodes[1].handle = refuse
        number, answer = await served.get("/nodes/terminate_all")
        assert (number, answer["error"]["code"]) == (502, "node_not_terminated")
        assert nodes[1].url in answer["error"]["message"]
        assert list((await served.get("/nodes/status"))[1]) == [nodes[1].url]
        nodes[1].handle = nodes[1].tell_name
        crossing = {"Sec-Fetch-Site": "cross-site"}
        assert (await served.get("/nodes/terminate_all", headers=crossing))[0] == 403
        assert await served.get("/nodes/terminate_all") == (200, "All nodes terminated successfully")
        assert (await served.get("/nodes/status"))[1] == {}


async def test_a_lease_is_renewed_and_ends() -> None:
    async with FakeNode() as node, distributing() as served:
        ends = []
        for lease in (100, 200, 0.01):
            assert (await served.post("/nodes/add", {"url": node.url, "lease_seconds": lease}))[0] == 200
            ends.append(served.node(node).lease_end)
        assert ends[2] < ends[0] < ends[1]  # type: ignore[operator]
        await until(lambda: not len(served.distributor.nodes))


@pytest.mark.parametrize("named_first", [True, False])
async def test_a_node_that_its_owner_has_named_needs_no_lease(named_first: bool) -> None:
    async with FakeNode() as node, distributing() as served:
        leases = [None, 0.05] if named_first else [0.05, None]
        for lease in leases:
            assert (await served.post("/nodes/add", {"url": node.url, "lease_seconds": lease}))[0] == 200
        await asyncio.sleep(0.15)
        assert await served.names(1) == ["one"]


@pytest.mark.parametrize(
    ("keys", "own_key", "allowed"),
    [
        ([], False, {None: 200, "client": 200, "owner": 200}),
        (["client"], False, {None: 401, "client": 200, "owner": 401}),
        (["client"], True, {None: 401, "client": 401, "owner": 200}),
        ([], True, {None: 401, "client": 401, "owner": 200}),
    ],
)
async def test_keys(keys: list[str], own_key: bool, allowed: dict[str | None, int], tmp_path: Path) -> None:
    (tmp_path / "owner").write_text("owner")
    owner = str(tmp_path / "owner") if own_key else None
    async with FakeNode() as node, distributing(node, started=False, api_keys=keys, admin_key_file=owner) as served:
        for key, status in allowed.items():
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert (await served.get("/nodes/status", headers=headers))[0] == status
            assert (await served.post("/nodes/add", {"url": node.url}, headers=headers))[0] == status
            # Other spellings of the path ask for the same key.
            for path in ("//nodes/status", "/nodes/status/", "/%6eodes/status"):
                async with served.http.get(URL(served.url + path, encoded=True), headers=headers) as response:
                    assert response.status == status
        await until(lambda: served.node(node).ready)
        assert (await served.post(CHAT))[0] == (401 if keys else 200)
        assert (await served.http.get(served.url + "/")).status == 200


class TestNodeFile:
    async def test_added_nodes_are_kept_and_registered_ones_are_not(self, tmp_path: Path) -> None:
        kept, leased, named = FakeNode("kept"), FakeNode("leased"), FakeNode("named")
        async with kept, leased, distributing(named, state_folder=str(tmp_path / "new")) as served:
            for node, lease in ((kept, None), (leased, 60)):
                body = {"url": node.url, "status": {"speed": 3}, "lease_seconds": lease}
                assert (await served.post("/nodes/add", body))[0] == 200
            [file] = (tmp_path / "new").iterdir()
            assert json.loads(file.read_text()) == [{"url": kept.url, "speed": 3.0}]
            port = int(file.stem.partition("-")[2])
            config = DistributorConfig(state_folder=str(tmp_path / "new"))
            again = await asyncio.to_thread(open_distributor, config, port)
            assert [(node.url, node.speed, node.state) for node in again.nodes] == [(kept.url, 3.0, State.NOT_READY)]
            assert (await served.post("/nodes/remove", {"url": kept.url}))[0] == 200
            assert json.loads(file.read_text()) == []

    @pytest.mark.parametrize("text", ["{", '{"url": 1}'])
    def test_a_damaged_file_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "nodes-1.json").write_text(text)
        with pytest.raises(InvalidParameter, match="Delete it"):
            open_distributor(DistributorConfig(state_folder=str(tmp_path)), 1)

    async def test_a_file_that_cannot_be_written_does_not_stop_the_nodes(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with FakeNode() as node, distributing(state_folder=str(tmp_path / "folder")) as served:
            (tmp_path / "folder").rmdir()
            assert (await served.post("/nodes/add", {"url": node.url}))[0] == 200
            assert await served.names(1) == ["one"]
        assert "cannot be kept" in caplog.text


async def test_metrics_forget_a_node_that_is_removed() -> None:
    node = FakeNode()
    async with distributing(node) as served:
        await served.names(1)

        async def metrics() -> str:
            async with served.http.get(served.url + "/metrics") as response:
                assert response.status == 200
                return await response.text()

        assert f'requests_total{{node="{node.url}",outcome="200"}} 1.0' in await metrics()
        assert (await served.post("/nodes/remove", {"url": node.url}))[0] == 200
        assert node.url not in await metrics()
    async with distributing(disable_metrics=True) as served:
        assert (await served.get("/metrics"))[0] == 404
