"""Tools for adding a model: modules' arguments and results, steps for layers alone, and the comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.cli import main
from asyncllm.errors import InvalidParameter, UnsupportedFeature, UnsupportedModel
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.rotary import RopeConfig
from asyncllm.models.build import open_model
from asyncllm.porting import ModuleIOExtractor, compare, continuous_tensor, make_step_context, recorded
from tests.checkpoints import build_checkpoint
from tests.models.parity import Case, folder_of, hub_model, open_case, random_tokens
from tests.quant.formats import change

LLAMA = Case("llama", "default")


def test_a_layer_of_ours_gives_what_that_of_transformers_does() -> None:
    """As LMDeploy's guide has it: what goes into the original, through the new one."""
    hub, model, ids = hub_model(LLAMA), open_case(LLAMA), torch.tensor([random_tokens(1, 12), random_tokens(2, 12)])
    _, given, output = ModuleIOExtractor(hub, hub.model.layers[1].self_attn).extract(ids)
    lengths = [12, 12]
    context = make_step_context(ids, model=model)
    with torch.inference_mode():
        found = model.layers[1].attn(continuous_tensor(given["hidden_states"], lengths), context)
    torch.testing.assert_close(found, continuous_tensor(output[0], lengths), rtol=1e-4, atol=1e-5)


def test_a_context_without_a_model() -> None:
    """A layer alone, of rows of unequal lengths: each row is as it is by itself."""
    attention = Attention(0, 32, AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8))
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    ids, x = torch.zeros(2, 9, dtype=torch.int64), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_size": 8,
        "kv_cache_dtype": torch.float32,
        "block_size": 4,
        "rope": RopeConfig(dim=8),
    }
    both = attention(continuous_tensor(x, [9, 5]), make_step_context(ids, [9, 5], **options))
    alone = attention(x[1, :5], make_step_context(ids[1, :5], **options))
    torch.testing.assert_close(both[9:], alone)
    assert len(both) == 14


def test_the_extractor_of_our_own_model() -> None:
    model, ids = open_case(LLAMA), torch.tensor(random_tokens(4, 7))
    call = ModuleIOExtractor(model, "layers.0.mlp").extract(ids)
    assert call.args[0].shape == (7, 64)
    torch.testing.assert_close(model.layers[0].mlp(*call.args), call.output)
    assert "forward" not in vars(model.layers[0].mlp)
    with pytest.raises(InvalidParameter, match="not a module of the model, which has embed"):
        ModuleIOExtractor(model, "layers.9")
    with pytest.raises(InvalidParameter, match="without a call of this MergedLinear"):
        ModuleIOExtractor(open_case(Case("mistral", "default")), "layers.0.mlp.gate_up").extract(ids)


def test_a_module_that_fails_is_left_as_it_was() -> None:
    module = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), recorded({"it": module}) as calls:
        module(torch.zeros(2, 5))
    assert calls == {"it": []}
    assert "forward" not in vars(module)


@pytest.mark.parametrize("lengths", [[3], [0, 3], [4, 5], [[1, 2]]])
def test_lengths_that_do_not_fit_are_refused(lengths: Any) -> None:
    with pytest.raises(InvalidParameter, match="2 lengths from 1 to 4"):
        make_step_context(torch.zeros(2, 4), lengths)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "falcon", "opt", "openai_gpt", "llama4", "mamba"])
def test_what_is_the_same(family: str) -> None:
    result = compare(folder_of(Case(family, "default")), count=40)
    places = [each.place for each in result.differences]
    assert places[0] == "embedding"
    assert places[-1] == "logits"
    assert [place for place in places if place.count(" ") == 1] == [f"layer {n}" for n in range(len(places) // 3)]
    assert result.first is None
    assert max(each.relative for each in result.differences[-1:]) < 1e-5


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_a_mixer_behind_attention(family: str) -> None:
    """It is what the layer has in attention's place."""
    result = compare(folder_of(Case(family, "default")), count=40)
    assert "layer 2 attention" in [each.place for each in result.differences]
    assert result.first is None


def test_the_first_place_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    assert main(["debug", "compare", str(folder), "--count", "9"]) == 0
    assert "the same" in capsys.readouterr().out
    changed = build_checkpoint("llama", tmp_path / "changed")
    change(changed, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].neg_())
    other = open_model(changed, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(sys.modules["asyncllm.porting.compare"], "open_model", lambda *args, **options: other)
    assert main(["debug", "compare", str(folder), "--tokens", "5", "6", "7"]) == 1
    shown = capsys.readouterr().out
    assert "the first place that differs: layer 1 attention" in shown
    assert shown.count("attention") == 2, "only what is inside of the layer that differs"


def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidParameter, match="numbers from 0 to 319"):
        compare(folder_of(LLAMA), tokens=[320])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    longest = hub_model(LLAMA).config.max_position_embeddings
    for options, param in (
        ({"count": 0}, "count"),
        ({"count": longest + 1}, "count"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1] * (longest + 1)}, "tokens"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"device": "cuda"}, "device"),
    ):
        with pytest.raises(InvalidParameter) as refused:
            compare(folder_of(LLAMA), **options)
        assert refused.value.param == param
    with pytest.raises(UnsupportedModel, match=r"transformers does not open .*\. Compare one") as unknown:
        compare(folder_of(Case("internlm2", "default")))
    assert "\n" not in str(unknown.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedFeature, match="pip install transformers"):
        compare(folder_of(LLAMA))
    assert main(["debug", "compare", str(folder_of(LLAMA))]) == 1
    assert "pip install transformers" in capsys.readouterr().err
