"""Embeddings from callers are transformers' `inputs_embeds`: the answer and its log-probabilities are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, UnsupportedFeature
from tests.checkpoints import build_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

SMALL = EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=40, max_prefill_token_num=8)
"""Prompts are computed in several chunks."""
NUM_TOKENS = 3


def answer_of(folder: Path, embeddings: Tensor) -> tuple[list[int], list[float]]:
    """Tokens of the greedy answer, and their log-probabilities, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, logprobs = [], []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            last = model(inputs_embeds=embeddings[None], use_cache=False).logits[0, -1].log_softmax(-1)
            tokens.append(int(last.argmax()))
            logprobs.append(float(last.max()))
            embeddings = torch.cat([embeddings, model.get_input_embeddings()(torch.tensor(tokens[-1:]))])
    return tokens, logprobs


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of the family that is the parameter."""
    return build_checkpoint(request.param, tmp_path / request.param)


@pytest.fixture
def embeddings(folder: Path) -> Tensor:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden_size = config.get("hidden_size") or config["n_embd"]
    return torch.randn(21, hidden_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def wanted(folder: Path, embeddings: Tensor) -> tuple[list[int], list[float]]:
    return answer_of(folder, embeddings)


FAMILIES = ["llama", "gemma2", "granite", "afmoe", "gpt2", "bloom", "qwen3_next"]
"""They scale such embeddings, do not, add positions, and normalise them."""


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
async def test_answers_are_those_of_transformers(
    folder: Path, embeddings: Tensor, wanted: tuple[list[int], list[float]]
) -> None:
    tokens, logprobs = wanted
    async with AsyncEngine(str(folder), SMALL) as engine:
        config = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
        answer = await engine.generate(input_embeddings=embeddings, gen_config=config)
    assert answer.token_ids == tokens
    found = [entry[token] for entry, token in zip(answer.logprobs or (), tokens, strict=True)]
    assert found == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("folder", ["gemma3n", "xglm"], indirect=True)
async def test_families_that_read_more_of_a_token_refuse_them(folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="enable_prompt_embeds"):
        await AsyncEngine(str(folder), SMALL).start()
