"""Agents and engines of quantized models: they answer, sleep, wake, and refuse what they cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.errors import InvalidParameter
from asyncllm.protocol import Sleep, UpdateWeights, Wake
from tests.adapters import write_adapter
from tests.agent.tiny_model import Driver, plain_greedy, prompt_of
from tests.checkpoints import build_checkpoint
from tests.quant.formats import fp8, gptq, is_projection, smooth_quant, write
from tests.quant.test_packed_weights import logits_of, open_cpu

FORMATS = {"gptq": gptq(4, 32, shuffled=True), "fp8": fp8("tensor", static=True), "int8": smooth_quant()}
PROMPT = prompt_of(19)
EVERYTHING = Wake(frozenset({"weights", "kv_cache"}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    dense = build_checkpoint("llama", root / "dense", hidden_size=128, intermediate_size=128, mlp_bias=False)
    return {"dense": dense, **{name: write(dense, root / name, fmt) for name, fmt in FORMATS.items()}}


def open_agent(folder: Path, model_format: str | None = None) -> ModelAgent:
    config = EngineConfig(
        device_type="cpu", block_size=4, num_gpu_blocks=40, max_batch_size=4, model_format=model_format
    )
    return ModelAgent(config.checked(), folder)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", [*FORMATS, "dense"])
def test_a_quantized_model_answers_after_its_sleep_as_before(folders: dict[str, Path], name: str, level: int) -> None:
    agent = open_agent(folders[name], "fp8" if name == "dense" else None)
    expected = plain_greedy(agent.model, PROMPT, 12)
    assert Driver(agent).generate(0, PROMPT, 12) == expected
    types = [parameter.dtype for parameter in agent.model.parameters()]
    for _ in range(2):
        agent.carry_out(Sleep(level))
        assert all(parameter.is_meta == (level == 2) for parameter in agent.model.parameters())
        agent.carry_out(EVERYTHING)
        assert [parameter.dtype for parameter in agent.model.parameters()] == types
        assert Driver(agent).generate(0, PROMPT, 12) == expected


def test_a_quantized_model_that_lost_its_weights_takes_no_others(folders: dict[str, Path]) -> None:
    agent = open_agent(folders["gptq"])
    expected = Driver(agent).generate(0, PROMPT, 12)
    agent.carry_out(Sleep(2))
    name = "model.layers.0.mlp.down_proj.qweight"
    with pytest.raises(InvalidParameter, match="whose weight is quantized"):
        agent.carry_out(UpdateWeights({name: torch.zeros(16, 128, dtype=torch.int32)}))
    agent.carry_out(EVERYTHING)
    assert Driver(agent).generate(0, PROMPT, 12) == expected


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_engine_of_a_quantized_model(folders: dict[str, Path]) -> None:
    config = EngineConfig(device_type="cpu", num_gpu_blocks=16, block_size=16)
    generation = GenerationConfig(max_new_tokens=8, ignore_eos=True, top_k=1)
    async with AsyncEngine(str(folders["gptq"]), config) as llm:
        answer = await llm.generate("What is 17 + 25?", generation)
        await llm.sleep(level=2)
        await llm.wake()
        assert (await llm.generate("What is 17 + 25?", generation)).token_ids == answer.token_ids
        assert len(answer.token_ids) == 8


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_adapter_adds_to_quantized_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(folders["dense"] / "model.safetensors")
    shapes = {name.removesuffix(".weight"): each.shape for name, each in weights.items() if is_projection(name)}
    adapter = write_adapter(tmp_path / "adapter", {name: (n, k) for name, (n, k) in shapes.items()})
    config = EngineConfig(device_type="cpu", num_gpu_blocks=16, block_size=16, adapters={"a": str(adapter)})
    found = []
    # What numpy reads in the same files, as plain weights.
    for folder in (folders["gptq"], folders["gptq"] / "plain"):
        async with AsyncEngine(str(folder), config) as llm:
            found.append([await llm.get_logits(PROMPT, adapter_name=name) for name in ("a", None)])
            await llm.sleep(level=2)
            await llm.wake()
            assert torch.equal(await llm.get_logits(PROMPT, adapter_name="a"), found[-1][0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert (found[0][0] - found[0][1]).abs().max() > 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_invariant_row_is_the_same_alone(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
    dense = build_checkpoint("qwen3_moe", tmp_path / "dense", **sizes)
    model = open_cpu(write(dense, tmp_path / "model", FORMATS[name]))
    model.make_batch_invariant()
    # Activations are not rounded then, so the model is the one that numpy reads.
    plain = logits_of(open_cpu(tmp_path / "model" / "plain"))
    assert (logits_of(model) - plain).norm() < 1e-4 * plain.norm()
    moe = model.get_submodule("layers.0.mlp")
    x, weights = torch.randn(5, 128), torch.rand(5, 2)
    ids = torch.tensor([[0, 3], [1, 3], [2, 0], [3, 1], [0, 1]])
    experts = moe.gate_up.method.experts
    together = experts(moe.gate_up, moe.down, x, weights, ids)
    assert torch.equal(experts(moe.gate_up, moe.down, x[3:4], weights[3:4], ids[3:4]), together[3:4])
