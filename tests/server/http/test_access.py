"""Who is let in: keys, Host, Origin, content types, TLS."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncllm import InvalidParameter
from asyncllm.config import ServerConfig
from asyncllm.server.app import build_app
from asyncllm.server.http.access import Access, Auth, read_keys
from asyncllm.server.http.listening import tls_context
from asyncllm.server.routes import ROUTES
from asyncllm.testing import FakeEngine
from tests.server.raw import connected, head, post
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

KEY = "sk-" + "k" * 40
ASK = {"messages": "ping"}
CHAT = "/v1/chat/completions"
PAGE = "https://page.example:8443"


class TestKeys:
    def test_they_come_from_config_file_and_environment(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_bytes("\ufeff# ours\n one \n\ntwo\nkey-with-ü\n".encode())
        config = ServerConfig(api_keys=[" zero", "one"], api_key_file=str(file))
        assert read_keys(config, {"ASYNCLLM_API_KEYS": "three, two ,"}) == ["zero", "one", "two", "key-with-ü", "three"]
        assert read_keys(ServerConfig(), {}) == []

    @pytest.mark.parametrize("content", [None, b"", b"\n# nothing\n", b"\xff\xfe\x00"])
    def test_a_file_without_keys_is_refused(self, tmp_path: Path, content: bytes | None) -> None:
        file = tmp_path / "keys"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(InvalidParameter) as caught:
            read_keys(ServerConfig(api_key_file=str(file)), {})
        assert caught.value.param == "api_key_file"

    @pytest.mark.parametrize("name", ["0.0.0.0", "::", "192.168.1.5", "box.example", "127.0.0.1.example"])
    def test_others_are_not_let_in_without_one(self, name: str) -> None:
        with pytest.raises(InvalidParameter) as caught:
            Access(ServerConfig(server_name=name), [])
        assert caught.value.param == "server_name"
        Access(ServerConfig(server_name=name), [KEY])
        Access(ServerConfig(server_name=name, insecure_no_auth=True), [])

    @pytest.mark.parametrize("name", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
    def test_this_machine_needs_none(self, name: str) -> None:
        assert Access(ServerConfig(server_name=name), []).num_keys == 0

    @pytest.mark.parametrize(
        "headers",
        [
            {"Authorization": f"Bearer {KEY}"},
            {"Authorization": f"bearer   {KEY} "},
            {"x-api-key": KEY},
            {"Authorization": "Basic eDp5", "X-API-KEY": KEY},
            {"Authorization": "Bearer key-with-ü".encode()},
        ],
        ids=str,
    )
    async def test_a_right_one_lets_in(self, headers: dict[str, str | bytes]) -> None:
        async with serving(FakeEngine(), api_keys=["other", "key-with-ü", KEY]) as served, connected(served) as wire:
            wire.send(post(CHAT, ASK, headers))
            assert (await wire.answer()).status == 200

    async def test_a_wrong_one_gets_the_same_answer_whatever_is_wrong(self) -> None:
        wrong: list[dict[str, str | bytes]] = [
            {},
            {"Authorization": ""},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer " + KEY[:-1]},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": f"Bearer {KEY},{KEY}"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": f"Bearer{KEY}"},
            {"Authorization": "Bearer " + KEY.upper()},
            {"Authorization": "Bearer wrong", "x-api-key": KEY},
            {"x-api-key": ""},
            {"x-api-key": "x" * 8000},
            {"Authorization": b"Bearer \xff\xfe\x80"},
            {"Authorization": "Bearer ключ".encode()},
            {"Authorization": "Bearer \N{ZERO WIDTH SPACE}".encode() + KEY.encode()},
        ]
        bodies = set()
        async with serving(FakeEngine(), api_keys=[KEY]) as served, connected(served) as wire:
            for headers in wrong:
                wire.send(post(CHAT, ASK, headers))
                answer = await wire.answer()
                assert answer.status == 401, headers
                assert answer.headers["www-authenticate"] == "Bearer"
                bodies.add(answer.body)
            assert served.engine.stats().requests_finished == 0
        assert len(bodies) == 1
        assert b"invalid_api_key" in bodies.pop()

    async def test_every_route_but_health_and_the_page_asks_for_one(self, tmp_path: Path) -> None:
        (tmp_path / "admin").write_text("owner", encoding="utf-8")
        everything: dict[str, Any] = {
            "adapters_folder": str(tmp_path),
            "admin_key_file": str(tmp_path / "admin"),
            "allow_terminate_by_client": True,
        }
        async with serving(FakeEngine(), api_keys=[KEY], **everything) as served:
            resources = {route.resource.canonical for route in build_app(served.service).router.routes()}
            assert resources == {re.sub(r":[^}]*}", "}", route.path) for route in ROUTES}
            public = {(route.method, route.path) for route in ROUTES if route.auth is Auth.PUBLIC}
            assert {path for _, path in public} == {
                "/",
                "/health",
                "/health_generate",
                "/ping",
                "/health/live",
                "/health/ready",
            }
            paths = {re.sub(r"{.*?}", "fake", path) for path in resources}
            paths |= {"/", "/no/such/path", "/v1", "/admin", "/metrics", "/openapi.json", "/terminate"}
            paths |= {f"{path}/" for path in paths} | {f"/{path}" for path in paths} | {path.upper() for path in paths}
            paths |= {
                "/%68ealth",
                "/health/../v1/models",
                "/health%2f..%2fv1/models",
                "/health;/v1/models",
                "/health?a=/",
            }
            bodies = set()
            async with connected(served) as wire:
                for path in sorted(paths):
                    for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"):
                        as_route = "GET" if method == "HEAD" else method
                        if (as_route == "GET" and path in ("/%68ealth", "/health?a=/")) or (as_route, path) in public:
                            continue
                        wire.send(head(method, path))
                        answer = await wire.answer(to_head=method == "HEAD")
                        assert answer.status == 401, (method, path)
                        bodies.add(answer.body)
            # Three forms of errors, OpenAI's, Anthropic's and Ollama's, that say the same.
            errors = [json.loads(body)["error"] for body in bodies - {b""}]
            assert len(errors) == 3
            told = [error for error in errors if isinstance(error, dict)]
            assert len({(error["type"], error["message"]) for error in told}) == 1
            assert [error for error in errors if error not in told] == [told[0]["message"]]
            for method, path in public:
                async with served.http.request(method, served.url + path) as response:
                    assert response.status == 200

    async def test_neither_keys_nor_prompts_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        engine = FakeEngine(row_failure=lambda history: "out of numbers" if history[-1:] == [ord("!")] else None)
        async with serving(engine, api_keys=[KEY]) as served, connected(served) as wire:
            for body in ({"messages": "secret"}, {"messages": "secret!", "temperature": 9}, b'{"messages": "secret'):
                wire.send(post(CHAT, body, {"x-api-key": KEY}))
                assert (await wire.answer()).status in (200, 400)
            wire.send(post("/v1/completions", {"prompt": "secret!"}, {"x-api-key": KEY}))
            assert (await wire.answer()).status == 500
            wire.send(post(CHAT, {"messages": "secret"}, {"x-api-key": KEY + "x"}))
            assert (await wire.answer()).status == 401
        assert "a request failed: " in caplog.text
        assert KEY not in caplog.text
        assert "secret" not in caplog.text


class TestPlaces:
    @pytest.mark.parametrize(
        "host", ["localhost", "LocalHost:80", "127.0.0.1:1", "0.0.0.0:1", "[::1]", "[::1]:443", "my.box:9"]
    )
    async def test_own_names_are_answered_to(self, host: str) -> None:
        async with serving(FakeEngine(), allowed_hosts=["My.Box:23333"]) as served, connected(served) as wire:
            wire.send(head("GET", "/v1/models", {"Host": host}))
            assert (await wire.answer()).status == 200

    async def test_other_names_are_not(self) -> None:
        """What an attacker's page makes its own name resolve to comes with that name."""
        others: list[str | bytes] = [
            *("", "evil.example", "evil.example:23333", "localhost.evil.example", "evil.localhost", "localhost."),
            *("127.0.0.2", "192.168.1.5", "2130706433", "0x7f.1", "127.1", "[::ffff:127.0.0.1]"),
            *("user@localhost", "localhost@evil.example", "localhost/evil", "localhost#", "localhost, evil.example"),
            *("[", "]", "]x[", "[]", "[::1", "::1", "[x]", "localhost:", "localhost:x", "localhost:999999", " "),
            *("℀.example".encode(), b"\xff\xfe", b"localhost\x0b", "ｌocalhost".encode()),
        ]
        async with serving(FakeEngine()) as served:
            for host in others:
                async with connected(served) as wire:
                    wire.send(head("GET", "/v1/models", {"Host": host}))
                    answer = await wire.answer()
                    assert answer.status in (400, 403), host
                    if answer.status == 403:
                        assert answer.json["error"]["code"] == "host_not_allowed"

    async def test_an_open_server_without_a_key_answers_to_addresses_and_names_of_a_local_network(self) -> None:
        """No page on the web can have such a name, so none can be led here by it."""
        own = [
            "192.168.1.5:80",
            "[fe80::1]",
            "gpu-box",
            "GPU-Box:23333",
            "gpu.lan",
            "llm.ns.svc.cluster.local",
            "llm.box",
        ]
        others = ["evil.example", "gpu-box.evil.example", "local.evil", "evil.lan.example", "lan.", "box..", ""]
        everything: dict[str, Any] = {"server_name": "0.0.0.0", "insecure_no_auth": True}
        async with serving(FakeEngine(), **everything, allowed_hosts=["llm.box"]) as served:
            for host in (*own, *others):
                found, answer = await served.get("/v1/models", headers={"Host": host})
                assert found == (200 if host in own else 403), host
                if host == "evil.example":
                    assert "--allowed-hosts evil.example" in answer["error"]["message"]
        async with serving(FakeEngine(), **everything, allowed_hosts=["*"]) as served:
            assert (await served.get("/v1/models", headers={"Host": "llm.example"}))[0] == 200

    @pytest.mark.parametrize("server_name", ["0.0.0.0", "127.0.0.1"])
    async def test_a_server_with_a_key_answers_to_any_name(self, server_name: str) -> None:
        async with serving(FakeEngine(), server_name=server_name, api_keys=[KEY]) as served:
            headers = {"Host": "llm.example", "x-api-key": KEY}
            assert (await served.get("/v1/models", headers=headers))[0] == 200

    @pytest.mark.parametrize(
        "origin",
        ["null", "", "https://evil.example", PAGE + "/", PAGE.upper(), "https://page.example", "http://localhost"],
    )
    async def test_other_pages_are_not_let_in(self, origin: str) -> None:
        async with serving(FakeEngine(), allow_origins=[PAGE]) as served:
            for path in ("/v1/models", "/health", "/none"):
                async with served.http.get(served.url + path, headers={"Origin": origin}) as response:
                    assert response.status == 403
                    assert (await response.json())["error"]["code"] == "origin_not_allowed"
                    assert "Access-Control-Allow-Origin" not in response.headers
            asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            async with served.http.options(served.url + CHAT, headers=asking) as response:
                assert response.status == 403
                assert not [name for name in response.headers if name.startswith("Access-Control")]

    async def test_the_own_page_is_let_in(self) -> None:
        async with serving(FakeEngine()) as served:
            status, _ = await served.post(CHAT, ASK, headers={"Origin": served.url})
            assert status == 200

    @pytest.mark.parametrize("credentials", [False, True])
    async def test_a_listed_page_may_ask_and_read(self, credentials: bool) -> None:
        async with serving(
            FakeEngine(), allow_origins=[PAGE], allow_credentials=credentials, allow_headers=["X-Mine"], api_keys=[KEY]
        ) as served:
            asking = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
            async with served.http.options(served.url + CHAT, headers=asking) as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
                assert response.headers["Access-Control-Allow-Headers"] == "X-Mine"
                allowed = [response.headers]
            for key, body, status in ((KEY, ASK, 200), (KEY, {**ASK, "stream": True}, 200), ("x", ASK, 401)):
                headers = {"Origin": PAGE, "x-api-key": key}
                async with served.http.post(served.url + CHAT, json=body, headers=headers) as response:
                    assert response.status == status
                    allowed.append(response.headers)
            for found in allowed:
                assert found["Access-Control-Allow-Origin"] == PAGE
                assert found["Vary"] == "Origin"
                assert {"X-Request-Id", "Retry-After"} <= {*found["Access-Control-Expose-Headers"].split(", ")}
                assert found.get("Access-Control-Allow-Credentials") == ("true" if credentials else None)

    async def test_what_a_page_may_send_is_granted_by_name(self) -> None:
        """OpenAI's client in a browser sends a dozen headers of its own."""
        wanted = "authorization, content-type, x-stainless-lang,x-stainless-os"
        asking = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        async with serving(FakeEngine(), allow_origins=[PAGE], allow_methods=["*"]) as served:
            async with served.http.options(served.url + CHAT, headers=asking) as response:
                assert response.headers["Access-Control-Allow-Headers"] == wanted
                assert response.headers["Access-Control-Allow-Methods"] == "POST"
            asking["Access-Control-Request-Headers"] = 'x"<>;'
            async with served.http.options(served.url + CHAT, headers=asking) as response:
                assert response.headers["Access-Control-Allow-Headers"] == "*"

    @pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:3000"])
    async def test_every_page_may_call_a_server_with_a_key_if_its_owner_wants_it(self, origin: str) -> None:
        async with serving(FakeEngine(), allow_origins=["*"], api_keys=[KEY]) as served:
            asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            async with served.http.options(served.url + CHAT, headers=asking) as response:
                assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, "*")
            for key, status in ((KEY, 200), ("x", 401)):
                headers = {"Origin": origin, "x-api-key": key}
                async with served.http.post(served.url + CHAT, json=ASK, headers=headers) as response:
                    assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, "*")
                    assert "Access-Control-Allow-Credentials" not in response.headers

    def test_without_a_key_every_page_is_a_risk_to_be_accepted(self) -> None:
        for loopback in ("127.0.0.1", "localhost"):
            with pytest.raises(InvalidParameter, match="insecure_no_auth") as caught:
                Access(ServerConfig(server_name=loopback, allow_origins=["*"]), [])
            assert caught.value.param == "allow_origins"
        Access(ServerConfig(allow_origins=["*"], insecure_no_auth=True), [])
        with pytest.raises(InvalidParameter) as caught:
            ServerConfig(allow_origins=["*"], allow_credentials=True).checked()
        assert caught.value.param == "allow_credentials"

    @pytest.mark.parametrize("origin", ["**", "null", "page.example", "https://*.example", "https://a.example/", ""])
    def test_a_pattern_is_no_origin(self, origin: str) -> None:
        with pytest.raises(InvalidParameter) as caught:
            ServerConfig(allow_origins=[origin]).checked()
        assert caught.value.param == "allow_origins"


class TestContents:
    @pytest.mark.parametrize(
        "kind",
        [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/jsonx",
            "json",
        ],
    )
    async def test_what_a_form_may_send_unasked_is_refused(self, kind: str) -> None:
        async with serving(FakeEngine(), allow_origins=[PAGE]) as served:
            for route in ROUTES:
                if route.body is None or route.only_with is not None:
                    continue
                # Programs may, as Ollama's documentation has them do it.
                says_browser = {"Origin": PAGE} if route.errors == "ollama" else {}
                async with connected(served) as wire:
                    wire.send(post(route.path, ASK, {"Content-Type": kind, **says_browser}))
                    answer = await wire.answer()
                    assert answer.status == 400
                    if route.errors == "anthropic":
                        assert answer.json["error"]["type"] == "invalid_request_error"
                    elif route.errors == "ollama":
                        assert answer.json["error"].startswith("The body must be JSON")
                    else:
                        assert answer.json["error"]["code"] == "unsupported_media_type"
                    assert await wire.closed() == b""

    @pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
    async def test_json_is_json(self, kind: str) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(post(CHAT, ASK, {"Content-Type": kind}))
            assert (await wire.answer()).status == 200

    async def test_a_request_id_is_a_label_or_a_new_one(self) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            for given in ("a.B-9_", "x" * 128, "x" * 129, "a b", "a%0ab", "a\tb", "é", ""):
                wire.send(head("GET", "/health", {"X-Request-Id": given}))
                answer = await wire.answer()
                assert answer.headers["x-content-type-options"] == "nosniff"
                found = answer.headers["x-request-id"]
                assert found == given if given in ("a.B-9_", "x" * 128) else re.fullmatch("[0-9a-f]{32}", found)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a certificate for 127.0.0.1, signed by itself, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "certificate.pem",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return str(folder / "certificate.pem"), str(folder / "key.pem")


class TestTLS:
    async def test_https_is_served_with_the_given_certificate(self, certificate: tuple[str, str]) -> None:
        files: dict[str, Any] = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
        async with serving(FakeEngine({"ping": "pong"}), ssl=True, **files) as served:
            assert served.url.startswith("https://")
            trusting = ssl.create_default_context(cafile=certificate[0])
            status, answer = await served.post(CHAT, ASK, ssl=trusting)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "pong")
            async with served.http.post(served.url + CHAT, json={**ASK, "stream": True}, ssl=trusting) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await served.get("/health")
            with pytest.raises(aiohttp.ClientError):
                await served.http.get(served.url.replace("https", "http") + "/health")
            old = ssl.create_default_context(cafile=certificate[0])
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            old.set_ciphers("AES128-SHA")
            with pytest.raises(aiohttp.ClientConnectorError):
                await served.get("/health", ssl=old)
            await asyncio.sleep(0)

    def test_files_that_do_not_serve_are_refused(
        self, certificate: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SSL_KEYFILE", raising=False)
        monkeypatch.delenv("SSL_CERTFILE", raising=False)
        empty = tmp_path / "empty.pem"
        empty.write_bytes(b"")
        for cert, key in (
            (None, None),
            (certificate[0], None),
            (certificate[0], str(tmp_path / "none.pem")),
            (certificate[0], str(empty)),
            (certificate[1], certificate[0]),
        ):
            with pytest.raises(InvalidParameter) as caught:
                tls_context(ServerConfig(ssl=True, ssl_certfile=cert, ssl_keyfile=key))
            assert caught.value.param == "ssl"
        monkeypatch.setenv("SSL_CERTFILE", certificate[0])
        monkeypatch.setenv("SSL_KEYFILE", certificate[1])
        assert tls_context(ServerConfig(ssl=True)) is not None
        assert tls_context(ServerConfig()) is None


async def test_what_can_be_got_can_be_asked_about() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served:
        for path, headers, status in (
            ("/", {}, 200),
            ("/health", {}, 200),
            ("/v1/models", {}, 401),
            ("/v1/models", {"Authorization": "Bearer secret"}, 200),
            ("/v1/models/other", {"Authorization": "Bearer secret"}, 404),
            ("/v1/chat/completions", {"Authorization": "Bearer secret"}, 405),
        ):
            async with served.http.head(served.url + path, headers=headers) as response:
                assert (response.status, await response.read()) == (status, b""), path
        assert (await served.get("/health"))[0] == 200
