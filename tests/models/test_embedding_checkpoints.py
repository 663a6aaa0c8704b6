"""Checkpoints made for embeddings, as the hub has them: no prefix, no head, a tokenizer that ends texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm import AsyncEngine, Embedding, EngineConfig
from asyncllm.errors import UnsupportedFeature
from tests.checkpoints import build_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

END = 2
"""The token that the tokenizer appends."""
TEXT = "What is 17 + 25?"


def embedding_folder(folder: Path, family: str = "qwen3", architecture: str = "Qwen3Model") -> Path:
    """A checkpoint as AutoModel saves it, with a tokenizer that appends a token."""
    build_checkpoint(family, folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items() if "lm_head" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder / "config.json", architectures=[architecture])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|im_start|>", special_tokens=[("<|im_start|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def engine_of(folder: Path) -> AsyncEngine:
    return AsyncEngine(str(folder), EngineConfig(dtype="float32", device_type="cpu", num_gpu_blocks=16))


def hub_states(folder: Path) -> tuple[list[int], Tensor]:
    """The ids of TEXT with the tokenizer's own end, and transformers' hidden states of them."""
    from transformers import AutoModel

    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return ids, states


def close(embedding: Embedding | list[Embedding], expected: Tensor) -> None:
    assert isinstance(embedding, Embedding)
    torch.testing.assert_close(torch.tensor(embedding.values), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen3", "Qwen3Model"), ("mistral", "MistralModel"), ("llama", "LlamaModel")]
)
async def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, architecture: str) -> None:
    folder = embedding_folder(tmp_path, family, architecture)
    ids, states = hub_states(folder)
    assert ids[-1] == END
    async with engine_of(folder) as engine:
        embedding = await engine.embed(TEXT)
        close(embedding, torch.nn.functional.normalize(states[-1], dim=0))
        # Ids are taken as they are, and an end that the text has already is not doubled.
        assert embedding == await engine.embed(ids)
        assert embedding == await engine.embed(f"{TEXT}<|im_start|>")
        assert embedding != await engine.embed(ids[:-1])


async def test_answers_and_logits_are_refused(tmp_path: Path) -> None:
    async with engine_of(embedding_folder(tmp_path)) as engine:
        for ask in (
            engine.generate(TEXT).response,
            engine.chat(TEXT).response,
            lambda: engine.batch_infer([TEXT]),
            lambda: engine.get_logits([5, 6]),
            lambda: engine.get_ppl([5, 6]),
        ):
            with pytest.raises(UnsupportedFeature, match=r"no output embedding.*Call embed"):
                await ask()
        engine.check_idle()
        await engine.embed(TEXT)


async def test_a_prompt_gets_no_end(tmp_path: Path) -> None:
    """The tokenizer's end is for embeddings alone: in a prompt it would say that all is said."""
    async with engine_of(embedding_folder(tmp_path)) as engine:
        ids = await engine.encode(TEXT, do_preprocess=False)
    assert END not in ids


@pytest.mark.parametrize("normalize", [True, False])
async def test_pooling_is_that_of_the_files_beside(tmp_path: Path, normalize: bool) -> None:
    folder = embedding_folder(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    mean = hub_states(folder)[1].mean(0)
    last = torch.nn.functional.normalize(hub_states(folder)[1][-1], dim=0)
    async with engine_of(folder) as engine:
        close(await engine.embed(TEXT), torch.nn.functional.normalize(mean, dim=0) if normalize else mean)
        close(await engine.embed(TEXT, pooling="last", normalize=True), last)
