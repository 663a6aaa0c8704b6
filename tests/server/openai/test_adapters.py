"""LoRA adapters over HTTP: named as models, listed with their parent, loaded and unloaded by the server's owner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from asyncllm.config import EngineConfig
from asyncllm.protocol import SlotStart
from asyncllm.testing import FakeEngine
from tests.adapters import write_adapter
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

OWNER = {"Authorization": "Bearer owner"}
PING: dict[str, Any] = {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 2}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def told(history: list[int], start: SlotStart) -> int:
    """Every token says which adapter a row has."""
    return ord("0") + start.adapter


def engine(**fields: Any) -> FakeEngine:
    config = EngineConfig(**{"adapters": {"sql": "/adapters/sql", "team/poet": "/adapters/poet"}, **fields})
    return FakeEngine(None, config, oracle=told)


async def owner(served: Served, path: str, **body: Any) -> tuple[int, str]:
    async with served.http.post(served.url + path, json=body, headers=OWNER) as response:
        return response.status, await response.text()


async def test_a_request_names_an_adapter_as_its_model() -> None:
    async with serving(engine()) as served, served.openai() as client:
        for name, text in (("fake", "00"), ("sql", "11"), ("team/poet", "22")):
            chat = await client.chat.completions.create(model=name, **PING)
            assert (chat.model, chat.choices[0].message.content) == (name, text)
            completion = await client.completions.create(model=name, prompt="ping", max_tokens=2)
            assert (completion.model, completion.choices[0].text) == (name, text)
            async for chunk in await client.chat.completions.create(model=name, stream=True, **PING):
                assert chunk.model == name
            response = await client.responses.create(model=name, input="ping", max_output_tokens=16)
            assert (response.model, response.output_text[:2]) == (name, text)
            embedding = await client.embeddings.create(model=name, input="ping")
            assert embedding.model == name
            _, generated = await served.post("/generate", {"prompt": "ping", "max_tokens": 2, "model": name})
            assert generated["text"] == text
            turn = {"prompt": "ping", "request_output_len": 2, "adapter_name": name}
            assert (await served.post("/v1/chat/interactive", turn))[1]["text"] == text
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="prose", **PING)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        status, _ = await served.post("/v1/chat/interactive", {"prompt": "ping", "adapter_name": "prose"})
        assert status == 404
        two = {"prompt": "ping", "model": "sql", "adapter_name": "team/poet"}
        assert (await served.post("/v1/chat/interactive", two))[0] == 400


async def test_models_are_listed_with_their_parents() -> None:
    async with serving(engine()) as served, served.openai() as client:
        listed = [(model.id, getattr(model, "parent", None)) async for model in client.models.list()]
        assert listed == [("fake", None), ("sql", "fake"), ("team/poet", "fake")]
        assert (await client.models.retrieve("team/poet")).id == "team/poet"
        _, document = await served.get("/openapi.json")
        model = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
        assert {"enum": ["fake", "sql", "team/poet"]} in model["anyOf"]


async def test_the_owner_loads_and_unloads(tmp_path: Path) -> None:
    keys, root = tmp_path / "keys", tmp_path / "adapters"
    keys.write_text("owner\n")
    write_adapter(root / "new", {"q": (4, 4)})
    write_adapter(root / "pickled", {"q": (4, 4)}, pickled=True)
    write_adapter(tmp_path / "elsewhere", {"q": (4, 4)})
    (root / "link").symlink_to(tmp_path / "elsewhere")
    fake = engine(max_loras=1)
    write_adapter(root / "leaking", {"q": (4, 4)})
    (root / "leaking" / "chat_template.jinja").symlink_to(keys)
    async with serving(fake, admin_key_file=str(keys), adapters_folder=str(root)) as served:
        assert (await served.post(LOAD, {"lora_name": "x", "lora_path": "new"}))[0] == 401
        status, said = await owner(served, LOAD, lora_name="x", lora_path=str(root / "new"))
        assert (status, said) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert fake.adapters["x"] == str(root / "new")
        assert (await served.post("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": 1}))[0] == 200
        for body, expected in (
            ({"lora_name": "x", "lora_path": "new"}, 400),
            ({"lora_name": "fake", "lora_path": "new"}, 400),
            ({"lora_name": "y"}, 400),
            ({"lora_name": "y", "lora_path": "new", "is_3d_lora_weight": True}, 400),
            ({"lora_name": "y", "lora_path": "pickled"}, 400),
            ({"lora_name": "y", "lora_path": "leaking"}, 400),
            ({"lora_name": "y", "lora_path": "nowhere"}, 404),
            ({"lora_name": "y", "lora_path": "../elsewhere"}, 404),
            ({"lora_name": "y", "lora_path": str(tmp_path / "elsewhere")}, 404),
            ({"lora_name": "y", "lora_path": "link"}, 404),
            ({"lora_name": "y", "lora_path": "a\0b"}, 404),
        ):
            assert (await owner(served, LOAD, **body))[0] == expected, body
        assert '"param":"lora_name"' in (await owner(served, LOAD, lora_name="x", lora_path="new"))[1]
        status, _ = await owner(served, LOAD, lora_name="x", lora_path="new", load_inplace=True)
        assert status == 200
        assert fake.executor.device.adapters == {1, 2, 4}, "what it replaced is gone"
        status, said = await owner(served, UNLOAD, lora_name="x", lora_int_id=7)
        assert (status, said) == (200, "Success: LoRA adapter 'x' removed successfully.")
        await until(lambda: fake.executor.device.adapters == {1, 2})
        assert (await owner(served, UNLOAD, lora_name="x"))[0] == 404
        assert (await served.post("/v1/completions", {"model": "x", "prompt": "a"}))[0] == 404
        assert set(fake.adapters) == {"sql", "team/poet"}


async def test_the_owner_loads_and_unloads_by_sglangs_routes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("owner\n")
    root = tmp_path / "adapters"
    write_adapter(root / "new", {"q": (4, 4)})
    write_adapter(root / "pickled", {"q": (4, 4)}, pickled=True)
    own = {"sql": "/adapters/sql", "team/poet": "/adapters/poet"}
    async with serving(engine(max_loras=1), admin_key_file=str(tmp_path / "keys"), adapters_folder=str(root)) as served:
        load, unload = "/load_lora_adapter", "/unload_lora_adapter"
        assert (await served.post(load, {"lora_name": "x", "lora_path": "new"}))[0] == 401

        async def asked(path: str, **body: Any) -> tuple[int, Any]:
            status, text = await owner(served, path, **body)
            return status, json.loads(text)

        loaded = {**own, "x": str(root / "new")}
        status, said = await asked(load, lora_name="x", lora_path="new", pinned=False)
        assert (status, said) == (200, {"success": True, "error_message": "", "loaded_adapters": loaded})
        for path, body, why in (
            (load, {"lora_name": "x", "lora_path": "new"}, "is loaded"),
            (load, {"lora_name": "y", "lora_path": "new", "pinned": True}, "pinned"),
            (load, {"lora_name": "y", "lora_path": "pickled"}, "safetensors"),
            (load, {"lora_name": "y", "lora_path": "../../etc"}, "adapters_folder"),
            (unload, {"lora_name": "y"}, "'y'"),
        ):
            status, said = await asked(path, **body)
            assert (status, said["success"], said["loaded_adapters"]) == (400, False, loaded)
            assert why in said["error_message"]
        status, said = await asked(unload, lora_name="x")
        assert (status, said) == (200, {"success": True, "error_message": "", "loaded_adapters": own})


async def test_without_a_folder_there_are_no_such_routes(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("owner\n")
    async with serving(engine(), admin_key_file=str(tmp_path / "keys")) as served:
        for path in (LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"):
            assert (await owner(served, path, lora_name="x", lora_path="new"))[0] == 404
