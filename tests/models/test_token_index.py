"""Which layers have an index of tokens, when it is left out, and what is refused with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, EngineConfig, UnsupportedFeature
from asyncllm.errors import InvalidCheckpoint
from asyncllm.layers.cache_spec import LatentKVSpec
from asyncllm.layers.sparse_latent_attention import IndexedLatentKVSpec, SparseLatentAttention
from asyncllm.models.build import open_model
from tests.models.parity import Case, Runner, folder_of, open_case, random_tokens, reference
from tests.models.test_config import read, tiny

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
LINES = LatentKVSpec(40, 8)
INDEXED = IndexedLatentKVSpec(LINES, 24)


@pytest.mark.parametrize(("family", "specs"), [("deepseek_v32", [INDEXED] * 2), ("glm_moe_dsa", [INDEXED, LINES] * 2)])
def test_layers_with_an_index_cache_its_keys(family: str, specs: list[object]) -> None:
    model = open_case(Case(family, "default"))
    assert (model.cache_specs, model.captured_context) == (specs, 20)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sessions_no_longer_than_the_choice_have_no_index(family: str) -> None:
    case, tokens = Case(family, "default"), random_tokens(1, 20)
    model = open_model(folder_of(case), dtype=torch.float32, device=torch.device("cpu"), session_len=20)
    assert set(model.cache_specs) == {LINES}
    assert model.captured_context is None
    assert not any(isinstance(module, SparseLatentAttention) for module in model.modules())
    runner = Runner(model, block_size=16)
    row = runner.row(tokens)
    runner.step((row, 20))
    assert (row.result - reference(case, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_contexts_as_long_as_the_choice_are_attended_to_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of latent attention have them; the step that exceeds it has not."""
    calls: list[int] = []
    attend = SparseLatentAttention._attend
    monkeypatch.setattr(SparseLatentAttention, "_attend", lambda self, *args: calls.append(1) or attend(self, *args))
    runner = Runner(open_case(Case(family, "default")), block_size=16)
    row = runner.row(random_tokens(1, 21))
    runner.step((row, 20))
    layers = len(runner.model.layers)
    assert len(calls) == layers
    runner.step((row, 1))
    assert len(calls) == layers
    assert (row.result - reference(Case(family, "default"), row.tokens)).abs().max() < 1e-4


def test_indices_of_a_file(tmp_path: Path) -> None:
    absent = dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"))
    for architecture, heads, interleaved in ((V32, 64, False), (GLM, 32, True)):
        longer = {**tiny(architecture), "max_position_embeddings": 163840}
        index = read(tmp_path, absent, longer).index
        assert (index.top_k, index.num_heads, index.head_dim, index.interleaved) == (2048, heads, 128, interleaved)
        assert read(tmp_path, absent, longer, session_len=2048).index is None
        assert read(tmp_path, absent, longer, session_len=2049).index == index
        assert read(tmp_path, {}, longer, rope_scaling_factor=2.0).dynamic_rope_from == 163840


@pytest.mark.parametrize(
    ("entries", "layers"),
    [
        ({"indexer_types": ["full", "shared", "shared", "full"]}, {0, 3}),
        ({"index_topk_pattern": "FSFS"}, {0, 2}),
        ({"index_topk_pattern": ["full", "full", "shared", "shared"]}, {0, 1}),
        ({"index_topk_freq": 2}, {0, 1, 3}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, {0, 1, 2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_layers_that_share_an_index(tmp_path: Path, entries: dict[str, Any], layers: set[int]) -> None:
    from transformers import GlmMoeDsaConfig

    kinds = GlmMoeDsaConfig(num_hidden_layers=4, **entries).indexer_types
    assert {layer for layer, kind in enumerate(kinds) if kind == "full"} == layers
    assert read(tmp_path, {"indexer_types": None, **entries}, tiny(GLM)).index.layers == layers


@pytest.mark.parametrize(
    ("architecture", "entries", "says"),
    [
        (GLM, {"indexer_types": ["full"]}, "each of 4 layers"),
        (GLM, {"indexer_types": None, "index_topk_pattern": "FSXS"}, "each of 4 layers"),
        (GLM, {"indexer_types": ["shared", "full", "full", "full"]}, "no index to share"),
        (V32, {"q_lora_rank": None}, "bottleneck"),
        (V32, {"index_head_dim": 4}, "8 rotated features"),
    ],
)
def test_a_wrong_index(tmp_path: Path, architecture: str, entries: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=says):
        read(tmp_path, entries, tiny(architecture))


def test_a_layer_that_shares_an_index_does_not_run_alone() -> None:
    runner = Runner(open_case(Case("glm_moe_dsa", "default")), block_size=16)
    runner.model.layers, layers = runner.model.layers[1:2], runner.model.layers
    try:
        with pytest.raises(UnsupportedFeature, match=r"Layer 1 .*longer than 20 tokens"):
            runner.step((runner.row(random_tokens(1)), 30))
    finally:
        runner.model.layers = layers


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_batch_invariance_takes_sessions_without_an_index() -> None:
    folder = str(folder_of(Case("deepseek_v32", "default")))
    settings: dict[str, Any] = {"device_type": "cpu", "batch_invariant": True, "num_gpu_blocks": 8}
    with pytest.raises(UnsupportedFeature, match="session_len of at most 20"):
        await AsyncEngine(folder, EngineConfig(**settings)).start()
    async with AsyncEngine(folder, EngineConfig(session_len=20, **settings)) as engine:
        assert engine.limits.max_position == 20
