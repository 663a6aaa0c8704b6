"""Embeddings from callers are transformers' `inputs_embeds`: the answer and its log-probabilities are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, UnsupportedFeature, UnsupportedModel
from asyncllm.models.config import HFConfig
from asyncllm.models.registry import families
from tests.checkpoints import build_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

SMALL = EngineConfig(enable_prompt_embeds=True, num_gpu_blocks=40, max_prefill_token_num=8)
"""Prompts are computed in several chunks."""
SCALED = {
    *("afmoe", "falcon_h1", "gemma", "gemma2", "gemma3", "granite", "granite_hybrid", "granite_moe", "granite_moe_swa"),
    *("granite_swa", "hyperclovax", "minicpm3", "recurrent_gemma", "vaultgemma"),
}
"""Families that scale the embeddings of tokens. transformers scales those of callers too in some of them."""
PLAIN = {"llama", "gpt2", "bloom", "qwen3_next"}
"""They add positions, normalise embeddings, and keep states."""
REFUSED = {"gemma3n", "gemma4", "xglm"}
NUM_LOGPROBS = 5


def logits_of(folder: Path, embeddings: Tensor) -> Tensor:
    """Return transformers' logits after the last of the embeddings [vocab]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        last: Tensor = model(inputs_embeds=embeddings[None], use_cache=False).logits[0, -1]
    return last


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
def wanted(folder: Path, embeddings: Tensor) -> Tensor:
    return logits_of(folder, embeddings)


def test_every_family_with_scaled_embeddings_is_compared() -> None:
    found = set()
    for name, family in families().items():
        try:
            config = family.configure(HFConfig(dict(family.tiny), source="tiny"), name)
        except UnsupportedModel:
            continue  # an architecture that shares its class with another one, whose entries these are
        if config.embedding_scale not in (None, 1.0):
            found.add(family.__module__.rpartition(".")[2])
    assert found <= SCALED | REFUSED
    assert found >= SCALED


@pytest.mark.parametrize("folder", sorted(SCALED | PLAIN), indirect=True)
async def test_answers_are_those_of_transformers(folder: Path, embeddings: Tensor, wanted: Tensor) -> None:
    async with AsyncEngine(str(folder), SMALL) as engine:
        config = GenerationConfig(max_new_tokens=3, ignore_eos=True, logprobs=NUM_LOGPROBS)
        answer = await engine.generate(input_embeddings=embeddings, gen_config=config)
    values, tokens = wanted.log_softmax(-1).topk(NUM_LOGPROBS)
    assert len(answer.token_ids) == 3
    assert answer.logprobs is not None
    assert answer.logprobs[0] == pytest.approx(dict(zip(tokens.tolist(), values.tolist(), strict=True)), abs=1e-4)


@pytest.mark.parametrize("folder", sorted(REFUSED), indirect=True)
async def test_families_that_read_more_of_a_token_refuse_them(folder: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="enable_prompt_embeds"):
        await AsyncEngine(str(folder), SMALL).start()
