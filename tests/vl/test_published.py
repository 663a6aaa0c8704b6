"""Families whose code is their authors' alone: what stands for images in their prompts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncllm import (
    AsyncEngine,
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    InvalidCheckpoint,
    InvalidMessage,
    InvalidParameter,
    ModelError,
    UnsupportedModel,
)
from asyncllm.models.build import open_model
from asyncllm.models.config import HFConfig
from asyncllm.models.registry import families
from asyncllm.models.vision_language import composed
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.vl.processing.molmo import CropGrid
from asyncllm.vl.processor import open_processor
from asyncllm.vl.towers.mgm import MgmConfig
from tests.checkpoints import perturb
from tests.vl.checkpoints import folder_of, greedy, picture, worst_difference
from tests.vl.published.families import PUBLISHED
from tests.vl.tiny_parts import IMAGE_ID

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

CONFIG = EngineConfig(block_size=8, num_gpu_blocks=128)


async def text_of(kind: str, prompt: Any) -> str:
    async with AsyncEngine(str(folder_of(kind)), CONFIG) as engine:
        return engine.tokenizer.decode(await engine.encode(prompt), skip_special_tokens=False)


FIVE = "<unk>" * 5
PROMPTS = [
    ("phi3_v", [(28, 28)], "<|image|>" * (5 * 4 + 3 * 2 + 1) + "\nwhat?"),
    ("mgm", [(9, 9)], "<image>" * 16 + "\nwhat?"),
    ("mgm_hd", [(9, 9), (20, 9)], ("<image>" * 80 + "\n") * 2 + "what?"),
    ("cogvlm2", [(9, 9)], "<|reserved|>" * 11 + "what?"),
    ("glm4v_9b", [(9, 9), (20, 9)], "<|begin_of_image|>" * 22 + "what?"),
    (
        "qwen_visual",
        [(9, 9), (20, 9)],
        "".join(f"Picture {n}: <img>{'<imgpad>' * 256}</img>\n" for n in (1, 2)) + "what?",
    ),
    (
        "kimi_vl",
        [(17, 8)],
        "<|media_start|>image<|media_content|>" + "<|media_pad|>" * 3 + "<|media_end|>what?",
    ),
    ("xcomposer2", [(9, 9)], "<image>" * 16 + "what?"),
    ("xcomposer2_5", [(56, 28)], "<image>" * (3 * 4 + 2 * 2 + 1) + "what?"),
    ("deepseek_vl2", [(23, 23)], "<image>" * (2 * 3 + 1 + 2 * 3) + "\nwhat?"),
    ("deepseek_vl2", [(46, 23), (23, 23)], "<image>" * (2 * 3 + 1 + 2 * 5) + "\n" + "<image>" * 13 + "\nwhat?"),
    ("deepseek_vl2", [(46, 23)] * 3, ("<image>" * 13 + "\n") * 3 + "what?"),
    (
        "minicpm_v_2_5",
        [(28, 28), (28, 56)],
        f"<image>{FIVE}</image>\n"
        f"<image>{FIVE}</image><slice><image>{FIVE}</image>\n<image>{FIVE}</image></slice>\nwhat?",
    ),
    (
        "minicpm_v_2_6",
        [(28, 28), (60, 28)],
        f"<image_id>0</image_id><image>{FIVE}</image>\n"
        f"<image_id>1</image_id><image>{FIVE}</image>{f'<slice>{FIVE}</slice>' * 2}\nwhat?",
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "expected"), PROMPTS)
async def test_what_stands_for_images(kind: str, sizes: list[tuple[int, int]], expected: str) -> None:
    pictures = [picture(seed, *size) for seed, size in enumerate(sizes)]
    text = await text_of(kind, ("what?", pictures))
    assert text == f"<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"


async def test_images_are_numbered_through_a_conversation() -> None:
    two = GenerationConfig(max_new_tokens=2, temperature=0, ignore_eos=True)
    async with AsyncEngine(str(folder_of("minicpm_v_2_6")), CONFIG) as engine, engine.session() as session:
        await session.chat(("one", [picture(1, 28, 28)]), two)
        await session.chat(("two", [picture(2, 28, 28)]), two)
        text = engine.tokenizer.decode(session.token_ids, skip_special_tokens=False)
    assert [f"<image_id>{number}</image_id>" in text for number in range(3)] == [True, True, False]


async def test_each_piece_of_a_text_begins_as_a_prompt_does(tmp_path: Path) -> None:
    """Phi-3-vision's tokenizer puts its first token behind images too."""
    shutil.copytree(folder_of("phi3_v"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": True}))
    async with AsyncEngine(str(tmp_path), CONFIG) as engine:
        ids = await engine.encode(("what?", [picture(1, 28, 28)]))
    assert ids[[index for index, token in enumerate(ids) if token == 4][-1] + 1] == 1


@pytest.mark.parametrize(
    ("kind", "changed", "error", "says"),
    [
        ("phi3_v", {"embd_layer": {"use_hd_transform": False}}, UnsupportedModel, "use_hd_transform"),
        ("phi3_v", {"img_processor": {"model_name": "x/y"}}, UnsupportedModel, "mm_vision_tower|model_name"),
        ("kimi_vl", {"vision_config": {"num_attention_heads": 5}}, InvalidCheckpoint, "num_attention_heads"),
        ("qwen_visual", {"hidden_size": 64}, UnsupportedModel, "output_dim"),
        ("xcomposer2_5", {"vision_config": {"image_size": 30}}, InvalidCheckpoint, "patches of 14"),
        ("mgm", {"mm_vision_tower_aux": "openai/davit"}, UnsupportedModel, "mm_vision_tower_aux"),
        ("mgm", {"image_size_aux": 100}, InvalidCheckpoint, "multiple of 32"),
        ("mgm", {"image_global": True}, UnsupportedModel, "image_grid"),
        ("deepseek_ocr", {"vision_config": {"model_name": "other"}}, UnsupportedModel, "model_name"),
        ("dots_ocr", {"vision_config": {"hidden_size": 32, "is_causal": True}}, UnsupportedModel, "is_causal"),
        ("phi4", {"vision_config": {"image_size": 28, "patch_size": 28}}, UnsupportedModel, "even number"),
        ("molmo_d", {"norm_after": True}, UnsupportedModel, "norm_after"),
        ("molmo_d", {"embedding_size": 400}, InvalidCheckpoint, "vocab_size"),
        ("cogvlm", {"vision_config": {"image_size": 30}}, InvalidCheckpoint, "image_size"),
        ("deepseek_vl2", {"tile_tag": "1D"}, UnsupportedModel, "tile_tag"),
        ("minicpm_v_2_5", {"version": "2.0"}, UnsupportedModel, "version"),
        ("minicpm_v_2_6", {"hidden_size": 32}, InvalidCheckpoint, "multiple of 128"),
    ],
)
def test_configs_that_are_refused(
    kind: str, changed: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(error, match=says):
        open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changed", "decoder"),
    [
        ({}, "DeepseekV2"),
        ({"use_mla": False, "kv_lora_rank": None}, "Deepseek"),
        ({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}, "DeepseekV3"),
    ],
)
def test_the_decoder_of_deepseek_vl2_is_of_a_generation(changed: dict[str, Any], decoder: str) -> None:
    fields = json.loads((folder_of("deepseek_vl2") / "config.json").read_text())
    parts = composed(
        HFConfig({**fields, "language_config": {**fields["language_config"], **changed}}), fields["architectures"][0]
    )
    assert parts is not None
    assert parts.decoder == f"{decoder}ForCausalLM"
    families()[parts.decoder].configure(parts.text, parts.decoder)


async def test_images_stand_in_front_of_the_question_for_cogvlm(tmp_path: Path) -> None:
    shutil.copytree(folder_of("cogvlm2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["chat_template"]
    file.write_text(json.dumps(fields))
    async with AsyncEngine(str(tmp_path), CONFIG) as engine:
        text = engine.tokenizer.decode(await engine.encode(("what?", [picture(1)])), skip_special_tokens=False)
    assert text == "<|reserved|>" * 11 + "Question: what? Answer:"


async def test_prompts_of_molmo_begin_as_its_code_begins_them() -> None:
    """The checkpoint's own template does not."""
    async with AsyncEngine(str(folder_of("molmo_d")), CONFIG) as engine:
        ids = await engine.encode(("what?", [picture(1)]))
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
        assert text == "<|endoftext|>" + "<image>" * ids.count(IMAGE_ID) + " User: what? Assistant:"


async def test_images_for_phi_4_need_its_adapter(tmp_path: Path) -> None:
    """One that is given counts in the place of the folder's own, and a request may name another."""
    source = folder_of("phi4")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "vision-lora")
    asked = ("what?", picture(1))
    async with AsyncEngine(str(tmp_path), CONFIG) as engine:
        assert len((await engine.generate("what?", greedy(4))).token_ids) == 4
        with pytest.raises(InvalidParameter, match="vision-lora"):
            await engine.generate(asked, greedy(4))
        engine.check_idle()
    own = str(source / "vision-lora")
    given = msgspec.structs.replace(CONFIG, adapters={"vision": own, "other": own})
    async with AsyncEngine(str(tmp_path), given) as engine:
        ids = await engine.encode(asked)
        for name in (None, "vision", "other"):
            answer = await engine.generate(asked, greedy(4), adapter_name=name)
            assert worst_difference("phi4", ids, [asked[1]], answer) < 1e-4
    async with AsyncEngine(str(source), CONFIG) as engine:
        assert list(engine.adapters) == ["vision"]


def test_a_template_that_is_given_counts_first() -> None:
    own = ChatTemplateConfig(chat_template="{{ messages[0]['content'] }}")
    assert [ChatTemplate.open(folder_of("molmo_d"), each).name for each in (None, own)] == ["molmo", "checkpoint"]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("deepseek_ocr", [(100, 90), (200, 140), (300, 100)]), ("phi4", [(10, 31), (45, 33), (100, 60)])],
)
def test_features_of_images_in_tiles(kind: str, sizes: list[tuple[int, int]]) -> None:
    """More of them than other tests have, and with padding that is no whole square of patches."""
    folder = folder_of(kind)
    processor, oracle = open_processor(folder), PUBLISHED[kind]().eval()
    perturb(oracle, 0)
    assert processor is not None
    pictures = [picture(seed, *size) for seed, size in enumerate(sizes)]
    prepared = [processor.prepare(image, {}) for image in pictures]
    assert len({image.tiles for image in prepared}) > 2
    model = open_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    assert model.vision is not None
    with torch.inference_mode():
        features = torch.cat(model.vision.encode(prepared))
        torch.testing.assert_close(features, oracle.features(pictures), atol=1e-4, rtol=0)


def test_crops_of_molmo() -> None:
    """As many as leave the image about as large as it is."""
    grid = CropGrid(side=336, patch=14, before=4, after=4)
    for size, tiles in (((336, 336), (1, 1)), ((700, 1000), (3, 4)), ((4000, 300), (12, 1)), ((112, 50), (1, 1))):
        assert grid.tiles(size, 12) == tiles, size
    assert grid.tokens((3, 4)) == (28, 36)


@pytest.mark.parametrize("kind", [kind for kind, family in PUBLISHED.items() if family.also])
def test_other_names_of_a_class(kind: str) -> None:
    file = folder_of(kind) / "config.json"
    hf = HFConfig(json.loads(file.read_text()), source=str(file))
    own = composed(hf, PUBLISHED[kind].architecture)
    for name in PUBLISHED[kind].also:
        other = composed(hf, name)
        assert own is not None
        assert other is not None
        assert own[1:] == other[1:]
        assert own.text.fields == other.text.fields


def test_images_that_moonvit_cannot_see(tmp_path: Path) -> None:
    source = folder_of("kimi_vl")
    fields = json.loads((source / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "pad_input": False}))
    with pytest.raises(UnsupportedModel, match="pad_input"):
        open_processor(tmp_path)
    processor = open_processor(source)
    assert processor is not None
    with pytest.raises(InvalidMessage, match="511 patches"):
        processor.prepare(picture(1, 2060, 2), {})


def test_towers_of_mgm_are_known_by_their_names() -> None:
    names = {
        "mm_vision_tower": "model_zoo/OpenAI/clip-vit-large-patch14-336",
        "mm_vision_tower_aux": "model_zoo/OpenAI/openclip-convnext-large-d-320-laion2B-s29B-b131K-ft-soup",
        "image_size_aux": 768,
    }
    for more, tokens in (({}, 576), ({"image_grid": 2, "image_global": True, "image_size_aux": 1536}, 2880)):
        fields = {**PUBLISHED["mgm"].fields, **names, **more}
        parts = composed(HFConfig(fields, source="/nowhere/config.json"), "MGMLlamaForCausalLM")
        assert parts is not None
        vision = parts.vision
        assert isinstance(vision, MgmConfig)
        assert (vision.small.num_layers, vision.read_layers) == (24, 23)
        assert vision.large.sizes == (192, 384, 768, 1536)
        assert (vision.grid**2 + vision.whole) * vision.small.side**2 == tokens
