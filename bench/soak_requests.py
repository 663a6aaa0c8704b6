"""What a soak asks: requests of every kind, drawn from a seed, some of them wrong, some of clients who will leave."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["LABEL_BASE", "Asked", "Leaves", "draw_requests"]

Leaves = Literal["in the head", "in the body", "at once", "waiting", "in the answer"]
"""When a client leaves: before its request is whole, right after it, a moment later, or while the answer comes."""
LEAVES: tuple[Leaves, ...] = ("in the head", "in the body", "at once", "waiting", "waiting", *(("in the answer",) * 4))

ABORTED, BAD, STREAMED = 0.10, 0.05, 0.5
"""Shares of all requests."""

LABEL_BASE = 10**6
"""Answers carry this plus the request's number as their session_id, by which the server's side of the soak finds them;
conversations have lower ids."""
CONVERSATIONS = 8
"""Of each client, some of which are left to be forgotten."""
WRONG_MODEL = "no-such-model"

WORDS = re.findall(
    r"\w+",
    "the river runs past an old mill and the children count boats while a dog sleeps in warm grass "
    "until evening comes and somebody tells a story about seven birds who could not agree on a song",
)
QUESTIONS = ("What is 17 + 25?", "Who are you?", "Tell me a story about a bird.", "Count from 1 to 9.", "Say hello.")


@dataclass(frozen=True)
class Asked:
    """One request, ready to be sent."""

    number: int
    kind: str
    method: str
    path: str
    body: bytes
    content_type: str = "application/json"
    leaves: Leaves | None = None
    delay: float = 0.0
    """Seconds until a client who leaves `waiting` does."""
    pieces: int = 0
    """Pieces of the answer that a client who leaves in it has read."""
    bad: bool = False
    closes: bool = False
    """Asks the server to close the connection after the answer."""

    @property
    def id(self) -> str:
        return f"soak-{self.number}"

    def data(self) -> bytes:
        """The bytes of it."""
        head = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: localhost",
            f"X-Request-Id: {self.id}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            *(["Connection: close"] if self.closes else []),
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + self.body


def draw_requests(seed: int, client: int, clients: int) -> Iterator[Asked]:
    """What one of so many clients asks, without an end; the same for the same seed. No number comes twice."""
    draw = _Draw(random.Random(f"{seed}/{client}"), client)
    number = client
    while True:
        yield draw.next(number)
        number += clients


class _Draw:
    def __init__(self, rng: random.Random, client: int) -> None:
        self._rng = rng
        self._conversations = range(client * CONVERSATIONS, (client + 1) * CONVERSATIONS)
        prefixes = random.Random(0)  # all clients have the same
        self._prefixes = [" ".join(prefixes.choices(WORDS, k=length)) for length in (10, 40, 80, 160, 300)]

    def next(self, number: int) -> Asked:
        rng = self._rng
        fate = rng.random()
        if fate < BAD:
            kind, method, path, body, *rest = rng.choice(_BAD)(self)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return Asked(number, kind, method, path, data, *rest, bad=True)
        makers = (self._chat, self._plain, self._talk, self._embed, self._native)
        kind, path, fields = rng.choices(makers, _WEIGHTS)[0]()
        leaves = rng.choice(LEAVES) if fate < BAD + ABORTED else None
        if leaves is not None and path in ("/v1/chat/completions", "/v1/completions"):
            fields["session_id"] = LABEL_BASE + number
        if "stream" in fields and (rng.random() < STREAMED or leaves == "in the answer"):
            fields["stream"] = True
            kind += ", streamed"
        return Asked(
            number,
            kind,
            "POST",
            path,
            json.dumps(fields).encode(),
            leaves=leaves,
            delay=rng.expovariate(1 / 0.3),
            pieces=rng.choice((1, 2, 5, 20)),
            closes=rng.random() < 0.1,
        )

    def _text(self) -> str:
        """A question behind a beginning that others have too, or a text of its own."""
        rng = self._rng
        if rng.random() < 0.2:
            return " ".join(rng.choices(WORDS, k=rng.choice((3, 30, 300))))
        return f"{rng.choice(self._prefixes)}. {rng.choice(QUESTIONS)}"

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {"max_tokens": rng.choice((1, 16, 64, 128, 200)), "stream": False}
        if rng.random() < 0.5:
            fields |= {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**31)}
        if rng.random() < 0.7:
            fields["ignore_eos"] = True
        if rng.random() < 0.2:
            fields["stop"] = [rng.choice(WORDS)]
        if rng.random() < 0.1:
            fields["priority"] = rng.choice((-1, 1))
        if rng.random() < 0.1:
            fields["timeout"] = rng.choice((0.2, 2.0, 30.0))
        if rng.random() < 0.2:
            fields["n"] = rng.choice((2, 3))
        return fields

    def _chat(self) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        fields = {"messages": [{"role": "user", "content": self._text()}], **self._sampling()}
        if rng.random() < 0.2:
            fields |= {"logprobs": True, "top_logprobs": rng.choice((0, 5))}
        if rng.random() < 0.3:
            fields["messages"] = [{"role": "system", "content": self._prefixes[1]}, *fields["messages"]]
        if rng.random() < 0.15:
            words = rng.choices(WORDS, k=4)
            fields["response_format"] = _schema({"enum": words} if rng.random() < 0.5 else {"type": "object"})
            return "structured chat", "/v1/chat/completions", fields
        return "chat", "/v1/chat/completions", fields

    def _plain(self) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        many = rng.random() < 0.2
        fields = {"prompt": [self._text(), self._text()] if many else self._text(), **self._sampling()}
        if rng.random() < 0.2:
            fields |= {"logprobs": rng.choice((0, 3)), "echo": rng.random() < 0.5}
        return "completion", "/v1/completions", fields

    def _talk(self) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        fields = {
            "prompt": rng.choice(QUESTIONS),
            "session_id": rng.choice(self._conversations),
            "interactive_mode": rng.random() < 0.7,
            "request_output_len": rng.choice((8, 32)),
            "stream": False,
        }
        return "conversation", "/v1/chat/interactive", fields

    def _embed(self) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        texts = [self._text() for _ in range(rng.choice((1, 3)))]
        return "embeddings", "/v1/embeddings", {"input": texts, "pooling": rng.choice(("mean", "last"))}

    def _native(self) -> tuple[str, str, dict[str, Any]]:
        if self._rng.random() < 0.3:
            return "tokenize", "/tokenize", {"prompt": self._text()}
        return "generate", "/generate", {"prompt": self._text(), "max_tokens": 32, "stream": False}


_WEIGHTS = (40, 30, 15, 8, 7)


_CHAT = "/v1/chat/completions"


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the response_format that holds answers to a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _wrong(kind: str, **changes: Any) -> Any:
    def make(draw: _Draw) -> tuple[Any, ...]:
        return f"bad: {kind}", "POST", _CHAT, {"messages": "Hi", "max_tokens": 4, **changes}

    return make


_BAD = (
    _wrong("unknown field", colour="red"),
    _wrong("type", temperature="hot"),
    _wrong("range", top_p=7),
    _wrong("unsupported", modalities=["text", "audio"]),
    _wrong("schema", response_format=_schema({"type": "wizard"})),
    _wrong("model", model=WRONG_MODEL),
    _wrong("choices", n=100_000),
    _wrong("token", logit_bias={"999999": 1}),
    _wrong("role", messages=[{"role": "wizard", "content": "Hi"}]),
    _wrong("length", messages="word " * 5000),
    _wrong("user", user_id="ann"),
    lambda draw: ("bad: JSON", "POST", _CHAT, b'{"messages": '),
    lambda draw: ("bad: type of the body", "POST", _CHAT, b"messages=Hi", "text/plain"),
    lambda draw: ("bad: route", "POST", f"/v1/{draw._rng.choice(WORDS)}", {}),
    lambda draw: ("bad: method", "PUT", "/v1/embeddings", {}),
    lambda draw: ("bad: ids", "POST", "/v1/completions", {"prompt": [1, 2, 10**6]}),
    lambda draw: ("bad: size", "POST", _CHAT, b'"' + b"x" * 200_000 + b'"'),
)
