"""LoRA adapters as PEFT writes them: equal to merged weights in every kind of layer, refused where they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.agent.adapters import AdapterPool
from asyncllm.agent.open_model import OpenedModel
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidCheckpoint, InvalidParameter, ModelError, ModelNotFound, UnsupportedModel
from asyncllm.layers.lora import ADAPTER_SLOTS, group_adapters
from asyncllm.models.build import open_model
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.adapter_files import AdapterFiles
from asyncllm.protocol import LoadAdapter
from tests.adapters import delta, merge, shapes_of, write_adapter
from tests.checkpoints import build_checkpoint
from tests.layers.steps import step_at
from tests.models.parity import Case, Runner, folder_of, hub_model, open_case, random_tokens
from tests.models.test_shares import open_share
from tests.quant.formats import awq, gptq, write
from tests.ranks.threads import in_ranks
from tests.vl.checkpoints import folder_of as vlm_folder

LLAMA = Case("llama", "default")
PROMPT, TOKENS = 30, 33


@contextmanager
def pooled(model: DecoderLM, **settings: Any) -> Iterator[AdapterPool]:
    """The adapters of a model that others use as well."""
    opened = OpenedModel(model, torch.device("cpu"), torch.float32, model.cache_specs, 256, Path())
    pool = AdapterPool(EngineConfig(**settings), opened)
    try:
        yield pool
    finally:
        pool.release()


def read_adapter(folder: Path, model: DecoderLM) -> AdapterFiles:
    """Those of an adapter that has copies of nothing or of the tiny Llama's embeddings."""
    return AdapterFiles.read(folder, model, folder_of(LLAMA))


def run(model: DecoderLM, tokens: list[list[int]], slots: list[int]) -> list[torch.Tensor]:
    """Logits of sequences beside one another, each with the adapter of its slot."""
    runner = Runner(model, block_size=8)
    rows = [runner.row(each, prompt_len=PROMPT) for each in tokens]
    for row, slot in zip(rows, slots, strict=True):
        row.adapter_slot = slot
    runner.step(*((row, PROMPT) for row in rows))
    for _ in range(TOKENS - PROMPT):
        runner.step(*((row, 1) for row in rows))
    return [row.result for row in rows]


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "gpt_neox", "gptj", "phi3", "falcon", "gemma2", "gemma3n", "glm", "deepseek_v2"),
        *("qwen3_moe", "jamba", "nemotron_h"),
    ],
)
def test_an_adapter_is_the_model_with_merged_weights(family: str, tmp_path: Path) -> None:
    """Whatever the family's files call its modules, and however its layers join and order their parts."""
    case = Case(family, "default")
    model, oracle = open_case(case), hub_model(case)
    shapes = {
        name: shape
        for name, shape in shapes_of(oracle).items()
        if "layers." in name or ".h." in name
        if "expert" not in name and "router" not in name and not name.endswith("kv_b_proj")
    }
    assert len(shapes) >= 2 * 2, "the layers of two blocks"
    folder = write_adapter(tmp_path, shapes)
    tokens = random_tokens(3, TOKENS)
    with torch.inference_mode():
        base, expected = (
            oracle(torch.tensor([tokens])).logits[0],
            merge(oracle, shapes)(torch.tensor([tokens])).logits[0],
        )
    with pooled(model, adapters={"a": str(folder)}) as pool:
        pool.put(1, 0)
        plain, adapted = run(model, [tokens, tokens], [-1, 0])
    torch.testing.assert_close(plain, base, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapted, expected, rtol=1e-4, atol=2e-4)
    assert (base - expected).abs().max() > 0.05, "the adapter changes something"


def llama_shapes(*ends: str) -> dict[str, tuple[int, int]]:
    return {name: shape for name, shape in shapes_of(hub_model(LLAMA), *ends).items() if "layers." in name}


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 6}}, 1.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 6, r"layers\.\d+\.self_attn.q_proj": 10}}, 2.5),
        ({"target_modules": "all-linear"}, 2.0),
        ({"target_modules": r".*\.(q_proj|k_proj)"}, 2.0),
        ({"fan_in_fan_out": True, "init_lora_weights": "gaussian", "lora_dropout": 0.5}, 2.0),
        ({"pickled": True, "dtype": torch.bfloat16}, 2.0),
        ({"lora_dtype": "float32", "lorap_emb_lr": 1e-06, "corda_config": {"cache_file": None}}, 2.0),
        ({"alpha_pattern": {r"layers\.[0-9]+\.(?:self_attn|mlp)\.\w+": 6}}, 1.5),
    ],
)
def test_scales_and_spellings(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    model, shapes = open_case(LLAMA), llama_shapes("q_proj", "down_proj")
    files = read_adapter(write_adapter(tmp_path, shapes, **config), model)
    assert set(files.layers) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("attn.qkv", "mlp.down")}
    (factors,) = files.layers["layers.1.attn.qkv"]
    assert factors.part == "q"
    tolerance = 2e-2 if "dtype" in config else 1e-5
    torch.testing.assert_close(factors.b @ factors.a, delta(Q, shapes[Q], scale=scale), rtol=tolerance, atol=tolerance)


def test_ranks_differ_by_module_and_by_adapter(tmp_path: Path) -> None:
    """Each row has its own adapter's result, and none that of one which had the slot before."""
    model, shapes = open_case(LLAMA), llama_shapes()
    write_adapter(tmp_path / "a", shapes, rank=19, ranks={Q: 3}, seed=1)
    write_adapter(tmp_path / "b", {Q: shapes[Q]}, rank=5, seed=2)
    tokens = [random_tokens(seed, TOKENS) for seed in range(4)]
    with pooled(model, adapters={name: str(tmp_path / name) for name in "ab"}) as pool:
        pool.put(2, 0)
        pool.put(1, 1)
        together = run(model, tokens, [0, -1, 1, 0])
        pool.put(1, 0)
        pool.put(2, 1)
        exchanged = run(model, tokens, [1, -1, 0, 1])
        pool.put(2, 0)
        (alone,) = run(model, tokens[:1], [0])
    for first, second in zip(together, exchanged, strict=True):
        assert torch.equal(first, second), "in whichever slot"
    torch.testing.assert_close(together[0], alone, rtol=1e-4, atol=1e-4)
    with pooled(model, max_loras=1):
        plain = run(model, tokens, [-1] * 4)
    assert torch.equal(plain[1], together[1]), "base rows are what they are beside base rows"
    assert not any(torch.allclose(plain[row], together[row], atol=1e-2) for row in (0, 2, 3))


REFUSED: list[tuple[dict[str, Any], type[ModelError], str]] = [
    ({"use_dora": True}, UnsupportedModel, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
    ({"bias": "lora_only"}, UnsupportedModel, "bias"),
    ({"lora_bias": True}, UnsupportedModel, "lora_bias"),
    ({"peft_type": "IA3"}, UnsupportedModel, "peft_type"),
    ({"layer_replication": [[0, 2]]}, UnsupportedModel, "layer_replication"),
    ({"trainable_token_indices": [1]}, UnsupportedModel, "trainable_token_indices"),
    ({"target_parameters": ["experts.gate"]}, UnsupportedModel, "target_parameters"),
    ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModel, "init_lora_weights"),
    ({"alora_invocation_tokens": [5]}, UnsupportedModel, "alora_invocation_tokens"),
    ({"some_new_feature": {"a": 1}}, UnsupportedModel, "some_new_feature"),
    ({"lora_parameters": {"rank": 8}, "peft_type": None}, UnsupportedModel, "mlx-lm"),
    ({"use_rslora": "true"}, InvalidCheckpoint, "use_rslora"),
    ({"r": 0}, InvalidCheckpoint, "r is 0"),
    ({"r": 8}, InvalidCheckpoint, "rank 8"),
    ({"r": True}, InvalidCheckpoint, "r is"),
    ({"lora_alpha": "16"}, InvalidCheckpoint, "lora_alpha"),
    ({"lora_alpha": math.nan}, InvalidCheckpoint, "lora_alpha"),
    ({"lora_alpha": 10**400}, InvalidCheckpoint, "lora_alpha"),
    ({"rank_pattern": [1]}, InvalidCheckpoint, "rank_pattern"),
    ({"alpha_pattern": {"(a+)+": 1}}, UnsupportedModel, "alpha_pattern"),
    ({"alpha_pattern": {"(?:a{1,9}){1,9}": 1}}, UnsupportedModel, "alpha_pattern"),
    ({"alpha_pattern": {"a?" * 9 + "a" * 9: 1}}, UnsupportedModel, "alpha_pattern"),
    ({"alpha_pattern": {"(a": 1}}, InvalidCheckpoint, "alpha_pattern"),
    ({"target_modules": ["v_proj"]}, InvalidCheckpoint, "target_modules"),
]


@pytest.mark.parametrize(("config", "kind", "named"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], kind: type[ModelError], named: str
) -> None:
    folder = write_adapter(tmp_path, {Q: (64, 48)}, **config)
    with pytest.raises(kind, match=rf"{named}.*\. (Correct|Fuse|Let|Merge|Name|Save|Take) "):
        read_adapter(folder, open_case(LLAMA))


@pytest.mark.parametrize(
    ("family", "module", "path"),
    [
        ("hy_v3", "model.layers.1.mlp.shared_experts.up_proj", "layers.1.mlp.shared.gate_up"),
        ("laguna", "model.layers.1.mlp.shared_experts.down_proj", "layers.1.mlp.shared.down"),
        ("lfm3", "model.layers.2.self_attn.g_proj", "layers.2.attn.gate"),
        ("mixtral", "model.layers.1.mlp.gate", "layers.1.mlp.router"),
    ],
)
def test_modules_are_found_by_the_names_that_transformers_has_given_them(
    tmp_path: Path, family: str, module: str, path: str
) -> None:
    case = Case(family, "default")
    shape = tuple(hub_model(case).get_submodule(module).weight.shape)
    assert set(read_adapter(write_adapter(tmp_path, {module: shape}), open_case(case)).layers) == {path}


def test_language_models_of_vision_models_take_adapters(tmp_path: Path) -> None:
    """By the names of transformers' modules today and before, and by those of the files."""
    model = open_model(vlm_folder("llava"), dtype=torch.float32, device=torch.device("cpu"))
    shape = model.get_submodule("layers.1.attn.qkv").whole_shapes["q"]
    for number, prefix in enumerate(("model.language_model.", "language_model.model.", "language_model.", "model.")):
        folder = write_adapter(tmp_path / str(number), {f"{prefix}layers.1.self_attn.q_proj": shape})
        (factors,) = read_adapter(folder, model).layers["layers.1.attn.qkv"]
        assert factors.part == "q"
    for number, module in enumerate(
        ("vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1")
    ):
        folder = write_adapter(tmp_path / f"tower {number}", {f"model.{module}": (24, 24)})
        with pytest.raises(UnsupportedModel, match=module.rpartition(".")[2]):
            read_adapter(folder, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".weight", ".default.weight"),
        ("model.layers", "_orig_mod.model.layers"),
        (".layers.", "._fsdp_wrapped_module.layers."),
        (".self_attn", "._checkpoint_wrapped_module.self_attn"),
        ("model.model.layers", "model.layers"),
        ("base_model.model.model.layers", "model.layers"),
    ],
)
def test_names_that_trainers_leave_are_pefts(tmp_path: Path, old: str, new: str) -> None:
    """Of the adapter while it was trained, of compiled and sharded modules, of a model without its head or wrapper."""
    folder, model = write_adapter(tmp_path, llama_shapes("q_proj")), open_case(LLAMA)
    expected = read_adapter(folder, model).layers
    file = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)
    found = read_adapter(folder, model).layers
    assert {path: [each.part for each in parts] for path, parts in found.items()} == {
        path: [each.part for each in parts] for path, parts in expected.items()
    }
    assert torch.equal(found["layers.1.attn.qkv"][0].b, expected["layers.1.attn.qkv"][0].b)


@pytest.mark.parametrize("name", ["non_lora_trainables.bin", "vit.safetensors", "new_embeddings.safetensors"])
def test_whole_modules_in_other_files_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path, {Q: (64, 48)})
    (folder / name).write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=name):
        read_adapter(folder, open_case(LLAMA))


@pytest.mark.parametrize(
    ("added", "shape", "kind", "named"),
    [
        ("self_attn.q_proj.lora_A.default.weight", (4, 48), InvalidCheckpoint, "two tensors"),
        ("self_attn.k_proj.lora_A.weight", (0,), InvalidCheckpoint, "empty"),
        ("mixer.conv1d.lora_A.weight", (4, 48, 3), UnsupportedModel, "convolution"),
        ("self_attn.q_proj.oft_R.weight", (4, 6), UnsupportedModel, "another method"),
    ],
)
def test_tensors_of_other_kinds_are_refused(
    tmp_path: Path, added: str, shape: tuple[int, ...], kind: type[ModelError], named: str
) -> None:
    folder = write_adapter(tmp_path, {Q: (64, 48)})
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), f"base_model.model.model.layers.1.{added}": torch.ones(shape)}, file)
    with pytest.raises(kind, match=named):
        read_adapter(folder, open_case(LLAMA))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", UnsupportedModel),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", UnsupportedModel),
        ("base_model.model.model.embed_tokens.lora_embedding_A", UnsupportedModel),
        ("base_model.model.lm_head.weight", UnsupportedModel),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", InvalidCheckpoint),
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", InvalidCheckpoint),
    ],
)
def test_tensors_that_are_not_understood_are_refused(tmp_path: Path, tensor: str, kind: type[ModelError]) -> None:
    folder = write_adapter(tmp_path, {Q: (64, 48)})
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), tensor: torch.ones(4, 48)}, file)
    with pytest.raises(kind):
        read_adapter(folder, open_case(LLAMA))


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor], model: DecoderLM | None = None) -> Path:
    """An adapter with these tensors, too, by default for the tiny Llama."""
    shape = (64, 48) if model is None else model.get_submodule("layers.1.attn.qkv").whole_shapes["q"]
    file = write_adapter(folder, {Q: shape}) / "adapter_model.safetensors"
    save_file({**load_file(file), **{f"base_model.model.{name}": each for name, each in tensors.items()}}, file)
    return folder


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embeddings_of(case: Case) -> dict[str, torch.Tensor]:
    tensors = load_file(folder_of(case) / "model.safetensors")
    return {EMBED: tensors[EMBED], HEAD: tensors.get(HEAD, tensors[EMBED]).clone()}


@pytest.mark.parametrize("case", [LLAMA, Case("gemma2", "default")], ids=["untied", "tied"])
def test_copies_of_the_bases_embeddings_change_nothing(tmp_path: Path, case: Case) -> None:
    """PEFT saves them after the vocabulary was resized; with tied embeddings the head is the token embedding."""
    model, copies = open_case(case), embeddings_of(case)
    (plain,) = AdapterFiles.read(with_tensors(tmp_path / "plain", {}, model), model, folder_of(case)).layers.values()
    for name, tensors in {"as they are": copies, "wider": {key: each.double() for key, each in copies.items()}}.items():
        folder = with_tensors(tmp_path / name, tensors, model)
        (found,) = AdapterFiles.read(folder, model, folder_of(case)).layers.values()
        assert torch.equal(found[0].b, plain[0].b)


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_copies_that_differ_are_refused(tmp_path: Path, name: str) -> None:
    copy = embeddings_of(LLAMA)[name]
    changed = copy.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    other = embeddings_of(LLAMA)[HEAD if name == EMBED else EMBED]
    for index, tensor in enumerate((changed, copy[:-1], torch.cat([copy, copy[:1]]), copy.bfloat16(), other)):
        with pytest.raises(UnsupportedModel, match=f"{name}' is another method's, or a weight of its own.*base's"):
            read_adapter(with_tensors(tmp_path / str(index), {name: tensor}), open_case(LLAMA))


def test_copies_of_other_weights_are_refused(tmp_path: Path) -> None:
    name = "model.norm.weight"
    tensors = {name: load_file(folder_of(LLAMA) / "model.safetensors")[name]}
    with pytest.raises(UnsupportedModel, match=name):
        read_adapter(with_tensors(tmp_path, tensors), open_case(LLAMA))


def test_modules_that_take_no_adapter_are_refused(tmp_path: Path) -> None:
    llama, latent, experts = (
        open_case(LLAMA),
        open_case(Case("deepseek_v2", "default")),
        open_case(Case("qwen3_moe", "default")),
    )
    cases = [
        (llama, "model.embed_tokens", UnsupportedModel),
        (llama, "lm_head", UnsupportedModel),
        (llama, "model.layers.7.self_attn.q_proj", InvalidCheckpoint),
        (llama, "model.layers.0.self_attn.w_proj", InvalidCheckpoint),
        (latent, "model.layers.0.self_attn.kv_b_proj", UnsupportedModel),
        (experts, "model.layers.1.mlp.experts.0.gate_proj", UnsupportedModel),
    ]
    for index, (model, module, kind) in enumerate(cases):
        with pytest.raises(kind, match=module.rpartition(".")[2]):
            read_adapter(write_adapter(tmp_path / str(index), {module: (64, 48)}), model)


def test_blocks_that_layers_share_take_none(tmp_path: Path) -> None:
    """An adapter is of one layer, and a weight of all."""
    model = open_case(Case("zamba2", "default"))
    shared = "model.layers.{}.shared_transformer.{}"
    for name in ("self_attn.q_proj", "self_attn.o_proj", "feed_forward.down_proj"):
        for layer in (1, 3):
            module = shared.format(layer, name)
            folder = write_adapter(tmp_path / module, {module: (64, 64)})
            with pytest.raises(UnsupportedModel, match=rf"{module}.* takes no adapter.*several layers share"):
                read_adapter(folder, model)
    # Another block has a single use.
    taken = shared.format(2, "self_attn.q_proj")
    files = read_adapter(write_adapter(tmp_path / "taken", {taken: (64, 64)}), model)
    assert list(files.layers) == ["layers.2.shared.attn.qkv"]


def test_factors_of_zeros_may_be_where_no_adapter_applies(tmp_path: Path) -> None:
    """PEFT's B begins at zero, and stays there for a tower that saw no image, and for keys that no layer reads."""
    shared, tower = (
        open_case(Case("gemma3n", "default")),
        open_model(vlm_folder("llava"), dtype=torch.float32, device=torch.device("cpu")),
    )
    cases = [
        (shared, "model.layers.4.self_attn.k_proj"),
        (tower, "model.vision_tower.encoder.layers.0.self_attn.q_proj"),
    ]
    for index, (model, module) in enumerate(cases):
        out, size = model.get_submodule("layers.1.attn.qkv").whole_shapes["q"]
        taken = "model.layers.1.self_attn.q_proj"
        folder = write_adapter(tmp_path / str(index), {taken: (out, size), module: (48, 64)})
        with pytest.raises(UnsupportedModel, match=module.rpartition(".")[2]):
            read_adapter(folder, model)
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors[f"base_model.model.{module}.lora_B.weight"].zero_()
        save_file(tensors, file)
        assert set(read_adapter(folder, model).layers) == {"layers.1.attn.qkv"}


def test_files_that_are_not_there_or_broken_are_refused(tmp_path: Path) -> None:
    model = open_case(LLAMA)
    with pytest.raises(ModelNotFound):
        read_adapter(tmp_path / "nowhere", model)
    with pytest.raises(InvalidCheckpoint, match=r"adapter_config\.json"):
        read_adapter(tmp_path, model)
    folder = write_adapter(tmp_path / "a", {Q: (64, 48)})
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match="adapter_model"):
        read_adapter(folder, model)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(InvalidCheckpoint, match="object"):
        read_adapter(folder, model)
    with pytest.raises(InvalidCheckpoint, match="lora_A"):
        read_adapter(write_adapter(tmp_path / "b", {Q: (64, 40)}), model)


def test_slots_take_what_they_were_made_for(tmp_path: Path) -> None:
    model, shapes = open_case(LLAMA), llama_shapes()
    high = write_adapter(tmp_path / "high", shapes, rank=17)
    narrow = write_adapter(tmp_path / "narrow", {Q: shapes[Q]}, rank=2)
    with (
        pytest.raises(InvalidParameter, match="max_lora_rank=17"),
        pooled(model, adapters={"a": str(high)}, max_lora_rank=16),
    ):
        pass
    with pooled(model, adapters={"a": str(narrow)}) as pool:
        with pytest.raises(InvalidParameter, match="max_lora_rank=17"):
            pool.load(LoadAdapter(2, "high", str(high)))
        with pytest.raises(UnsupportedModel, match="slots were made"):
            pool.load(LoadAdapter(2, "wide", str(write_adapter(tmp_path / "wide", shapes, rank=2))))
        pool.load(LoadAdapter(3, "narrow", str(narrow)))
        assert [path for path, layer in model.named_modules() if getattr(layer, "adapters", None)] == [
            "layers.1.attn.qkv"
        ], "no other layer does more than before"


def test_ranks_have_shares_of_adapters(tmp_path: Path) -> None:
    """What they add up to is the whole model's: of rows of qkv with fewer key heads than ranks, and of input features,
    whose sums go the way of the weights' own."""
    shapes = llama_shapes()
    folder = write_adapter(tmp_path, shapes, rank=6)
    tokens = [random_tokens(seed, TOKENS) for seed in range(2)]

    def share(group: Any) -> list[torch.Tensor]:
        model = open_share(LLAMA, group)
        with pooled(model, adapters={"a": str(folder)}) as pool:
            pool.put(1, 0)
            return run(model, tokens, [0, -1])

    (whole,) = [share(None)]
    for found in in_ranks(2, share):
        for mine, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_many_decode_rows_and_all_that_must_not_depend_on_their_number_are_grouped() -> None:
    rows = 70
    slots = torch.tensor([0, 1] * (rows // 2), dtype=torch.int32)
    step = replace(step_at(list(range(rows))), adapted=True, more={ADAPTER_SLOTS: slots})
    found = []
    for num_decode, invariant in ((64, False), (66, False), (0, True)):
        given = replace(step, num_decode=num_decode, batch_invariant=invariant)
        group_adapters(given)
        found.append(None if given.adapter_groups is None else int((given.adapter_groups.rows >= 0).sum()))
    assert found == [None, 66, 70]


def test_quantized_weights_take_adapters(tmp_path: Path) -> None:
    """A layer's method multiplies, and what is added is the same."""
    folder = build_checkpoint("llama", tmp_path / "model", hidden_size=128, intermediate_size=256)
    opened = {
        name: open_model(folder, dtype=torch.float32, device=torch.device("cpu"), model_format=name)
        for name in (None, "fp8")
    }
    for name, form in (("awq", awq(32)), ("gptq", gptq(4, 32))):
        packed = write(folder, tmp_path / name, form)
        opened[name] = open_model(packed, dtype=torch.float32, device=torch.device("cpu"))
    names = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.endswith("q_proj.weight")
    }
    adapter = write_adapter(tmp_path / "a", names)
    x, slots = torch.randn(3, 128), torch.tensor([0, -1, 0], dtype=torch.int32)
    step = replace(step_at([0, 1, 2]), adapted=True, more={ADAPTER_SLOTS: slots})
    for name, model in opened.items():
        qkv = model.layers[0].attn.qkv
        plain = qkv(x, step)
        assert qkv.method.name == (name or "")
        with pooled(model, adapters={"a": str(adapter)}) as pool:
            pool.put(1, 0)
            added = qkv(x, step) - plain
        module = "model.layers.0.self_attn.q_proj"
        expected = torch.zeros_like(plain)
        expected[::2, qkv.rows["q"]] = x[::2] @ delta(module, names[module]).t()
        torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)
