"""Heads that score sequences: as transformers has them, through the whole engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from asyncllm import AsyncEngine, EngineConfig, SequenceScores, pipeline
from asyncllm.errors import InvalidCheckpoint, UnsupportedFeature
from asyncllm.models.registry import read_config
from tests.models.parity import Case, folder_of, oracle_folder_of, random_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

HIDDEN = 64
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((1, 33, 80, 9))]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEADS: dict[tuple[str, str], dict[str, Tensor]] = {
    ("llama", "LlamaForSequenceClassification"): {"score.weight": drawn(3, HIDDEN, seed=1)},
    ("gemma2", "Gemma2ForSequenceClassification"): {"score.weight": drawn(1, HIDDEN, seed=2)},
    # Files of transformers differ from published ones, which have another class.
    ("minimax", "MiniMaxForSequenceClassification"): {"score.weight": drawn(1, HIDDEN, seed=8)},
    ("internlm2", "InternLM2ForRewardModel"): {"v_head.weight": drawn(1, HIDDEN, seed=3)},
    ("qwen2", "Qwen2ForRewardModel"): {
        "score.0.weight": drawn(HIDDEN, HIDDEN, seed=4),
        "score.0.bias": drawn(HIDDEN, seed=5),
        "score.2.weight": drawn(1, HIDDEN, seed=6),
        "score.2.bias": drawn(1, seed=7),
    },
}


def checkpoint(family: str, architecture: str, folder: Path, head: dict[str, Tensor] | None = None) -> Path:
    """A family's tiny checkpoint with such a head in the place of its own."""
    shutil.copytree(folder_of(Case(family, "default")), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "output.weight"):
        tensors.pop(name, None)
    file = folder / "model.safetensors"
    added = HEADS[family, architecture] if head is None else head
    save_file({**tensors, **added}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    labels = {str(label): f"LABEL_{label}" for label in range(3)}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], "id2label": labels}))
    return folder


def expected(family: str, architecture: str, tokens: list[int]) -> Tensor:
    """What the head says of transformers' last hidden state."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(oracle_folder_of(Case(family, "default")), attn_implementation="eager").eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens])).last_hidden_state[0, -1].float()
    head = HEADS[family, architecture]
    if "score.0.weight" in head:
        hidden = functional.linear(hidden, head["score.0.weight"], head["score.0.bias"]).relu()
        return functional.linear(hidden, head["score.2.weight"], head["score.2.bias"])
    return functional.linear(hidden, *head.values())


def engine_of(folder: Path, **settings: Any) -> AsyncEngine:
    fields = {"device_type": "cpu", "dtype": "float32", "num_gpu_blocks": 200, "block_size": 4, **settings}
    return AsyncEngine(str(folder), EngineConfig(**fields))


@pytest.fixture(scope="module", params=HEADS, ids=lambda names: names[1])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A checkpoint, and what is expected for each prompt."""
    family, architecture = request.param
    folder = checkpoint(family, architecture, tmp_path_factory.mktemp(family))
    assert read_config(folder).architecture == architecture
    return folder, [expected(family, architecture, tokens) for tokens in PROMPTS]


async def test_scores(known: tuple[Path, list[Tensor]]) -> None:
    folder, answers = known
    async with engine_of(folder, max_prefill_token_num=16) as engine:
        found = await engine.classify(PROMPTS)
        assert isinstance(found, list)
        for tokens, scores, answer in zip(PROMPTS, found, answers, strict=True):
            assert scores.input_token_len == len(tokens)
            torch.testing.assert_close(torch.tensor(scores.values), answer, atol=1e-4, rtol=1e-4)
        if len(found[0].values) == 1:
            assert await engine.get_reward_score(PROMPTS[1]) == pytest.approx(found[1].values[0], abs=1e-3)
        else:
            with pytest.raises(UnsupportedFeature, match="3 scores"):
                await engine.get_reward_score(PROMPTS[1])
        with pytest.raises(UnsupportedFeature, match="no output embedding"):
            await engine.generate("a")
        again = await engine.classify("a text")
        assert isinstance(again, SequenceScores)


def test_the_class_of_transformers_gives_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    family, architecture = "llama", "LlamaForSequenceClassification"
    folder = checkpoint(family, architecture, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    for tokens in PROMPTS[1:]:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits, expected(family, architecture, tokens), atol=1e-4, rtol=1e-4)


async def test_a_class_that_scores_needs_its_head(tmp_path: Path) -> None:
    folder = checkpoint("llama", "LlamaForSequenceClassification", tmp_path, head={})
    with pytest.raises(InvalidCheckpoint, match="no head"):
        async with engine_of(folder):
            pass


async def test_a_model_without_such_a_head_says_so() -> None:
    async with engine_of(folder_of(Case("llama", "default"))) as engine:
        for call in (engine.classify("a"), engine.get_reward_score([5, 6])):
            with pytest.raises(UnsupportedFeature, match="ForRewardModel"):
                await call


def test_rewards_of_a_pipeline(tmp_path: Path) -> None:
    folder = checkpoint("internlm2", "InternLM2ForRewardModel", tmp_path)
    with pipeline(str(folder), backend_config=EngineConfig(device_type="cpu", num_gpu_blocks=50)) as pipe:
        both = pipe.get_reward_score([PROMPTS[1], PROMPTS[3]])
        assert pipe.get_reward_score(PROMPTS[1]) == pytest.approx(both[:1], abs=1e-3)
        scores = pipe.classify(PROMPTS[3])
        assert isinstance(scores, SequenceScores)
        assert scores.values == pytest.approx(both[1:], abs=1e-3)
