"""`prompt_embeds` of completions, as vLLM's clients send them."""

from __future__ import annotations

import base64
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, EngineConfig, Tokenizer
from asyncllm.locate import locate
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

ROUTE = "/v1/completions"
TOKENIZER = Tokenizer("tiny-chat")
IDS = TOKENIZER.encode("Once upon a time there was")
TABLE = load_file(locate("tiny-chat") / "model.safetensors")["model.embed_tokens.weight"]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def sent(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else saved(value)).decode()


def server() -> AbstractAsyncContextManager[Served]:
    return serving(AsyncEngine("tiny-chat", EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=100)))


async def test_they_are_answered_like_tokens() -> None:
    embeds = TABLE[IDS]
    common: Any = {"model": "tiny-chat", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    async with server() as served, served.openai() as client:
        [wanted] = (await client.completions.create(prompt=IDS, **common)).choices
        for each in (embeds, embeds.float(), embeds.double(), TABLE.float()[IDS[:1] + IDS][1:]):
            several: Any = {"prompt_embeds": [sent(each), sent(each)]}
            answer = await client.completions.create(prompt="Hello", extra_body=several, **common)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert answer.choices[0].text == answer.choices[1].text == wanted.text
            found = answer.choices[0].logprobs
            assert found is not None
            assert wanted.logprobs is not None
            assert found.tokens == wanted.logprobs.tokens
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 2 * len(IDS) + len(TOKENIZER.encode("Hello"))
        alone = await client.completions.create(prompt="", extra_body={"prompt_embeds": sent(embeds.half())}, **common)
        assert len(alone.choices) == 1
        stream = await client.completions.create(
            prompt="", extra_body={"prompt_embeds": sent(embeds)}, stream=True, **common
        )
        assert "".join([event.choices[0].text async for event in stream]) == wanted.text
        body = {"max_tokens": 6, "temperature": 0, "prompt": None, "prompt_embeds": sent(embeds)}
        assert (await served.post(ROUTE, body))[1]["choices"][0]["text"] == wanted.text


@pytest.fixture
def _nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


class Running:
    """Pickled, it runs a command as it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def repacked(data: bytes, compression: int = zipfile.ZIP_STORED, **changed: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.rpartition("/")[2].replace(".", "_"), old.read(name)))
    return file.getvalue()


WHOLE = saved(torch.ones(2, 256))


WRONG = [
    "####",
    b"no archive",
    WHOLE[:-40],
    {"a": 1},
    [torch.ones(2, 256)] * 2,
    torch.ones(256),
    torch.ones(2, 3),
    torch.ones(2, 256, dtype=torch.int64),
    torch.ones(256, 2).T,
    torch.full((2, 256), torch.inf),
    torch.ones(2, 256).to_sparse(),
    repacked(WHOLE, zipfile.ZIP_DEFLATED),
    repacked(WHOLE, byteorder=b"big"),
    repacked(WHOLE, data_pkl=pickle.dumps(Running())),
    repacked(WHOLE, data_pkl=pickle.dumps(5)),
]


@pytest.mark.usefixtures("_nothing_runs")
async def test_what_is_no_tensor_is_refused_and_runs_nothing() -> None:
    async with server() as served:
        for value in WRONG:
            embeds = value if isinstance(value, str) else sent(value)
            status, answer = await served.post(ROUTE, {"prompt_embeds": embeds})
            error = answer["error"]
            assert (status, error["param"], error["code"]) == (400, "prompt_embeds", "invalid_value"), error


async def test_fields_about_the_tokens_of_a_prompt_are_refused() -> None:
    async with server() as served:
        for name, value in (("echo", True), ("suffix", "end"), ("truncate_prompt_tokens", 3)):
            status, answer = await served.post(ROUTE, {"prompt_embeds": sent(WHOLE), name: value})
            assert (status, answer["error"]["param"]) == (400, name)
        for body, param in (({"prompt_embeds": []}, "prompt_embeds"), ({}, "prompt")):
            status, answer = await served.post(ROUTE, body)
            assert (status, answer["error"]["param"]) == (400, param)


async def test_a_server_has_to_be_told_to_take_them() -> None:
    async with serving(FakeEngine("pong")) as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="--enable-prompt-embeds"):
            await client.completions.create(model="fake", prompt="", extra_body={"prompt_embeds": sent(WHOLE)})
        _, document = await served.get("/openapi.json")
        fields = document["components"]["schemas"]["CompletionRequest"]
        assert fields["properties"]["prompt_embeds"]["anyOf"] == [{"type": "null"}]
        assert "prompt" in fields["required"]
