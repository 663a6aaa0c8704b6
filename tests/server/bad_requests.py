"""Requests that are wrong in some way, made up from the Structs' own declarations, a seed, and what breaks servers.

A `Case` is bytes for a fresh or a used connection. What the answer must be is the same for all: no 5xx, within seconds.
"""

from __future__ import annotations

import json
import math
import random
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

from asyncllm.server.openai.requests import ChatRequest, CompletionRequest
from asyncllm.server.routes import ROUTES
from tests.server.raw import head, post

__all__ = ["Case", "bad_requests"]

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MODEST: dict[str, Any] = {"max_tokens": 2}
"""So that what turns out to be right ends soon."""

BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": "ping", **MODEST}),
    PLAIN: (CompletionRequest, {"prompt": "ping", **MODEST}),
}


class Raw(str):
    """JSON text that stands where a value would, such as a number that no float holds."""


class Case(NamedTuple):
    """One request, or what is sent in its stead."""

    kind: str
    data: bytes
    alone: bool = False
    """Whether the connection is unusable afterwards."""


def bad_requests(seed: int, count: int) -> Iterator[Case]:
    """`count` cases, the same for the same seed. Not all are wrong: what is accepted must be served."""
    rng = random.Random(seed)
    made = [*_MAKERS]
    weights = [_MAKERS[maker] for maker in made]
    for _ in range(count):
        yield rng.choices(made, weights)[0](rng)


def dumped(value: Any) -> str:
    """JSON, with `Raw` as it is, NaN, surrogates and all."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


def _asked(rng: random.Random, changes: dict[str, Any], path: str | None = None) -> tuple[str, bytes]:
    path = path or rng.choice([*BODIES])
    body = {**BODIES[path][1], **changes}
    if rng.random() < 0.3:
        body["stream"] = True
    return path, dumped(body).encode()


def _numeric(kind: type[msgspec.Struct]) -> list[tuple[str, msgspec.Meta | None]]:
    """The fields that take a number, with their bounds."""
    found = []
    for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
        members = typing.get_args(annotation) if typing.get_origin(annotation) is not Annotated else (annotation,)
        for member in members or (annotation,):
            plain, *extra = typing.get_args(member) if typing.get_origin(member) is Annotated else (member,)
            if plain in (int, float):
                found.append((name, next((each for each in extra if isinstance(each, msgspec.Meta)), None)))
    return found


_NUMERIC = {path: _numeric(kind) for path, (kind, _) in BODIES.items()}


def boundary(rng: random.Random) -> Case:
    """A number at, before and beyond what the field declares, or far away."""
    path = rng.choice([*BODIES])
    name, meta = rng.choice(_NUMERIC[path])
    bounds = [each for each in (meta.ge, meta.gt, meta.le, meta.lt) if each is not None] if meta is not None else []
    near = [bound + step for bound in bounds for step in (-1, -0.001, -1e-9, 0, 1e-9, 0.001, 1)]
    far = [0, -0.0, -1, 1, 1.5, 2**31 - 1, 2**31, 2**53 + 1, -(2**63), 2**63, 2**64, 10**25, 1e-300, 1e300, 5e-324]
    odd = [Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity"), Raw("1" * 5000), Raw("0.1e-9999"), Raw("01")]
    value = rng.choice([*near * 2, *far, *odd, str(rng.choice(near or far)), True])
    if name == "n" and isinstance(value, int) and value > 4:
        value += 1000  # one that is served would take long
    return Case(f"boundary {name}", post(*_asked(rng, {name: value}, path)))


def _value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and some that it cannot."""
    simple: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, 1, -1, 2**31, 10**25, -(2**70), 0.5, 1e308, Raw("1e400"), Raw("-0")]),
        lambda: rng.choice(
            ["", "ping", "\0", "\ud800", "a\udfffb", "é" * 9, "\u202e", "x" * 999, "null", "1", "<eos>"]
        ),
        lambda: math.nan,
        lambda: Raw(
            rng.choice(["undefined", "tru", "'a'", "[1,]", "{a:1}", "{,}", "+1", ".5", "1.", '"\\x41"', '"\t"'])
        ),
    ]
    if depth < 3 and rng.random() < 0.4:
        items = [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        if rng.random() < 0.5:
            return items
        return {str(rng.choice(["a", "", "0", "-1", "type", "text", "role", "content"])): item for item in items}
    return rng.choice(simple)()


def confusion(rng: random.Random) -> Case:
    """A field with a value of some other type."""
    path = rng.choice([*BODIES])
    fields = [*BODIES[path][0].__struct_fields__]
    changes = {rng.choice(fields): _value(rng) for _ in range(rng.choice([1, 1, 1, 2, 5]))}
    if changes.get("n") is True:
        del changes["n"]
    return Case(f"type {[*changes]}", post(*_asked(rng, changes, path)))


def names(rng: random.Random) -> Case:
    """A field that there is none of, or one left out."""
    path = rng.choice([*BODIES])
    name = rng.choice(["", "colour", "Model", "__class__", "a`b", "\0", "x" * 5000, "é", "\ud800", "n ", "messages\n"])
    if rng.random() < 0.2:
        return Case("no field", post(path, rng.choice([b"{}", b"[]", b"null", b"1", b'""', b"{}{}", b"true"])))
    return Case("name", post(*_asked(rng, {name: _value(rng)}, path)))


def syntax(rng: random.Random) -> Case:
    """JSON that is cut, changed, nested, doubled or in another encoding."""
    path, data = _asked(rng, {})
    text = data.decode()
    deep = rng.choice([900, 1100, 10**5])
    number = "1" * rng.choice([400, 4301, 10**5, 10**6])
    choices: list[Callable[[], bytes]] = [
        lambda: data[: rng.randrange(len(data))],
        lambda: data + rng.choice([b"x", b"{}", b",", b"\0", b"]", data]),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "cp037"])),
        lambda: data.replace(
            b"ping", rng.choice([b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80", b"a\0b"])
        ),
        lambda: data.replace(b"ping", rng.choice([b"\\ud800", b"\\udc00\\ud800", b"\\u", b"\\u12", b"\\q", b"\n"])),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
        lambda: data[:-1] + b',"user":' + b"[" * deep + b"]" * deep + b"}",
        lambda: data[:-1] + b',"user":' + b'{"a":' * deep + b"1" + b"}" * deep + b"}",
        lambda: b"[" * deep,
        lambda: data[:-1] + b',"%b":%b}' % (rng.choice([b"seed", b"user", b"temperature"]), number.encode()),
        lambda: data[:-1] + b',"max_tokens":1,"max_tokens":"x"}',
        lambda: data[:-1] + b',"logit_bias":{"1":1,"1":2,"%b":3}}' % number[:5000].encode(),
        lambda: b" " * rng.randrange(5000),
        lambda: b"",
        lambda: _flipped(rng, data),
    ]
    return Case("syntax", post(path, rng.choice(choices)()))


def _flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def structure(rng: random.Random) -> Case:
    """Messages and prompts that no conversation has."""
    roles = ["user", "assistant", "system", "developer", "tool", "User", "robot", "", None, 5, ["user"], "\0"]
    contents: list[Any] = [
        "ping",
        "",
        None,
        5,
        [],
        {},
        [{"type": "text", "text": "a"}],
        [{"type": "text"}],
        "\x02\x1f\x03",
    ]
    contents += [[{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}], [5], "<eos>" * 9, "é" * 99]
    extra = [{}, {}, {"name": "a"}, {"tool_calls": []}, {"tool_calls": [{"id": 1}]}, {"tool_call_id": "x"}, {"a": 1}]
    if rng.random() < 0.7:
        messages: Any = [
            {"role": rng.choice(roles), "content": rng.choice(contents), **rng.choice(extra)}
            for _ in range(rng.choice([0, 1, 1, 2, 3, 60]))
        ]
        if rng.random() < 0.2:
            messages = [*messages, rng.choice([None, "x", [], {}, 5])]
        return Case("messages", post(*_asked(rng, {"messages": messages}, CHAT)))
    prompt: Any = rng.choice(
        [
            *(
                [],
                [[]],
                [""],
                "",
                ["a"] * 300,
                [1, "a"],
                [[1], "a"],
                [[[1]]],
                [None],
                [1.5],
                [-1],
                [258],
                [10**25],
                [True],
            ),
            *(
                [[1, 2], [3]],
                ["a", "b"],
                "x" * 5000,
                [65] * 5000,
                {"a": 1},
                5,
                None,
                [[258]],
                [[-1]],
                "\ud800",
                [[1] * 4096],
            ),
        ]
    )
    return Case("prompt", post(*_asked(rng, {"prompt": prompt, "echo": rng.choice([None, True])}, PLAIN)))


def sessions(rng: random.Random) -> Case:
    """Labels of sessions and requests."""
    label = rng.choice([-2, -1, 0, 1, 7, 2**31 - 1, 2**31, "7", 7.0, None, [7], True])
    name = rng.choice(["a", "", "a b", "a\n", "\x1b[31m", "x" * 129, "../../etc/passwd", "é", 5, "{{7*7}}"])
    model = rng.choice([None, "fake", "Fake", "", "other", "../fake", "x" * 9999, "a\r\nX: y", 5, "\0"])
    changes = {"session_id": label, "request_id": name, "model": model}
    for gone in rng.sample([*changes], rng.randrange(3)):
        del changes[gone]
    return Case("session", post(*_asked(rng, changes)))


def places(rng: random.Random) -> Case:
    """Methods, paths and headers that a browser, a probe or an attacker sends."""
    method = rng.choice(
        ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "X" * 40]
    )
    known = [route.path.replace("{id:.+}", "fake") for route in ROUTES]
    path = rng.choice(
        [*known, "/none", "/v1", "/admin", "/.env", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/a/b/c"]
    )
    path = rng.choice(
        [path, path + "/", "/" + path, path + "?a=b&a=%ff", path + "#x", path.upper(), path + "/../..", path + ";"]
    )
    headers: dict[str, str | bytes] = {}
    for name, values in {
        "Host": [
            "localhost",
            "127.0.0.1:1",
            "evil.example",
            "",
            "[::1]",
            "[",
            "]x[",
            "localhost:99999",
            "a@localhost",
            b"\xff",
        ],
        "Origin": ["null", "http://localhost", "https://evil.example", "", b"\xff\xfe", "file://"],
        "Authorization": ["Bearer", "Bearer x", "Basic eA==", b"Bearer \xff", "Bearer " + "x" * 4000, ""],
        "x-api-key": ["x", "", b"\x80"],
        "Content-Type": [
            "application/json",
            "text/plain",
            "application/json; charset=utf-16",
            "",
            ";",
            b"\xff",
            "a/b/c;d=e;f",
        ],
        "Content-Encoding": ["gzip", "deflate", "br", "zstd", "identity", "x, gzip", ""],
        "Expect": ["100-continue", "x"],
        "X-Request-Id": ["a", "a b", b"\xff", "x" * 300],
        "Accept": ["text/html", "*/*", "", b"\xff"],
        "Access-Control-Request-Method": ["POST"],
        "Range": ["bytes=0-1", "x"],
        "Cookie": ["a=b; c", b"\xff=\xff", "x" * 4000],
        "Upgrade": ["websocket", "h2c"],
        "Connection": ["close", "keep-alive", "upgrade", "x"],
    }.items():
        if rng.random() < 0.15:
            headers[name] = rng.choice(values)
    if method == "POST" and rng.random() < 0.7:
        return Case("place", post(path, dumped(BODIES[CHAT][1]).encode(), headers), alone=True)
    return Case("place", head(method, path, headers), alone=True)


def framing(rng: random.Random) -> Case:
    """Bytes that are not quite HTTP."""
    body = dumped(BODIES[CHAT][1]).encode()
    json_ = b"Content-Type: application/json\r\n"
    host = b"Host: localhost\r\n"
    start = b"POST /v1/chat/completions HTTP/1.1\r\n"
    size = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    one = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    whole = start + host + json_ + size + b"\r\n" + body
    choices: list[Callable[[], bytes]] = [
        lambda: start + host + json_ + size + chunked + b"\r\n" + one,
        lambda: start + host + json_ + chunked + size + b"\r\n" + body,
        lambda: start + host + json_ + size + b"Content-Length: 5\r\n\r\n" + body,
        lambda: (
            start
            + host
            + json_
            + b"Content-Length: %b\r\n\r\n"
            % rng.choice([b"-1", b"+5", b"0x10", b"1_0", b"5,5", b"", b" ", b"9" * 30, b"1e3", b"\xb2", b"5 5"])
            + body
        ),
        lambda: (
            start
            + host
            + json_
            + chunked
            + b"\r\n"
            + rng.choice(
                [
                    b"x\r\n",
                    b"-5\r\nabcde\r\n",
                    b"fffffffffffffffff\r\n",
                    b"0x5\r\nabcde\r\n",
                    b"5\nabcde\n0\n\n",
                    b"5;" + b"a" * 9000,
                    b"5\r\nabcdefgh\r\n0\r\n\r\n",
                    b" 5\r\nabcde\r\n0\r\n\r\n",
                    b"5 \r\nabcde\r\n0\r\n\r\n",
                    b"\r\n\r\n",
                    b"5\r\nabc",
                    b"0\r\nA: b\r\n\r\n",
                    b"0\r\n" + b"A: b\r\n" * 500 + b"\r\n",
                    b"0\r\nContent-Length: 5\r\n\r\nabcde",
                ]
            )
        ),
        lambda: (
            start
            + host
            + json_
            + b"Transfer-Encoding: %b\r\n\r\n"
            % rng.choice(
                [
                    b"x",
                    b"chunked, identity",
                    b"identity",
                    b"gzip, chunked",
                    b"chunked, chunked",
                    b"xchunked",
                    b"\x0bchunked",
                ]
            )
            + one
        ),
        lambda: start + json_ + size + b"\r\n" + body,
        lambda: start + host + b"Host: evil.example\r\n" + json_ + size + b"\r\n" + body,
        lambda: whole.replace(b"\r\n", b"\n"),
        lambda: whole.replace(b"\r\n", b"\r"),
        lambda: whole.replace(
            b"HTTP/1.1", rng.choice([b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.10", b"", b"X"])
        ),
        lambda: b"GET /health\r\n\r\n",
        lambda: b"GET http://evil.example/health HTTP/1.1\r\n" + host + b"\r\n",
        lambda: b"GET http://localhost:99999999/health HTTP/1.1\r\n" + host + b"\r\n",
        lambda: b"GET http://[/health HTTP/1.1\r\n" + host + b"\r\n",
        lambda: b"GET //[/x HTTP/1.1\r\n" + host + b"\r\n",
        lambda: b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
        lambda: b"CONNECT evil.example:443 HTTP/1.1\r\n" + host + b"\r\n",
        lambda: (
            b"GET "
            + rng.choice([b"", b"health", b"/\xff\xfe", b"/%", b"/%zz", b"/\0", b"/a b", b"/" + b"a" * 9000])
            + b" HTTP/1.1\r\n"
            + host
            + b"\r\n"
        ),
        lambda: start + host + b"A: " + b"x" * rng.choice([8000, 9000, 100_000]) + b"\r\n\r\n",
        lambda: start + host + b"".join(b"A%d: x\r\n" % each for each in range(rng.choice([120, 200, 5000]))) + b"\r\n",
        lambda: (
            start
            + host
            + rng.choice([b"A : b", b" A: b", b"A", b": b", b"A\0: b", b"A: \0", b"A: b\r\n c", b"\xff: b", b"A: b\rc"])
            + b"\r\n\r\n"
        ),
        lambda: b"\r\n" * rng.randrange(1, 5) + whole,
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: _flipped(rng, whole),
        lambda: whole[: rng.randrange(1, len(whole))],
        lambda: (whole + head("GET", "/health")) * rng.randrange(2, 9),
        lambda: whole + b"GARBAGE\r\n\r\n",
        lambda: start + host + b"Connection: upgrade\r\nUpgrade: websocket\r\n" + json_ + size + b"\r\n" + body,
    ]
    return Case("framing", rng.choice(choices)(), alone=True)


_MAKERS: dict[Callable[[random.Random], Case], int] = {
    boundary: 25,
    confusion: 22,
    names: 6,
    syntax: 12,
    structure: 10,
    sessions: 5,
    places: 8,
    framing: 12,
}
"""Maker -> its share in a hundred."""
