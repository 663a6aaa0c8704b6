"""Pixels and numbers of tokens against transformers' image processors, over sizes and ratios."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from asyncllm import InvalidCheckpoint, InvalidMessage, InvalidParameter, UnsupportedModel
from asyncllm.models.build import open_model
from asyncllm.vl.processing.clip import CenterProcessor, PaddedProcessor
from asyncllm.vl.processing.kimi_vl import KimiVlProcessor
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processor import open_processor
from tests.vl.checkpoints import ALL_KINDS, folder_of, image_processor_of, picture
from tests.vl.kinds import KINDS
from tests.vl.layouts import original_deepseek, original_llava
from tests.vl.llama4_pictures import llama4_pictures
from tests.vl.published.families import PUBLISHED

SIZES = [
    *((28, 28), (40, 30), (30, 40), (29, 57), (57, 29), (100, 100), (13, 13), (90, 31), (31, 90), (64, 48)),
    *((200, 10), (10, 200), (33, 34), (111, 77), (77, 111), (56, 56), (1, 1), (84, 28), (250, 130), (60, 61)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(kind: str) -> None:
    folder = folder_of(kind)
    ours, oracle = open_processor(folder), image_processor_of(folder)
    assert ours is not None
    for seed, size in enumerate(SIZES):
        image = picture(seed, *size)
        prepared = ours.prepare(image, {})
        theirs = oracle(
            [image], return_tensors="pt", **({"crop_to_patches": True} if kind.startswith(("intern", "aya")) else {})
        )
        expected = theirs["pixel_values"].numpy()
        if "image_grid_thw" in theirs:
            patches = tuple(theirs["image_grid_thw"][0, 1:].tolist())
            rows, columns = (each // 2 for each in patches)
            assert (prepared.grid, prepared.pictures) in (((rows, columns), ()), (None, (patches,))), size
            if kind in ("paddleocr_vl", "kimi_k25"):
                expected = expected.reshape(rows, 2, columns, 2, -1).transpose(0, 2, 1, 3, 4)
            else:
                expected = expected.reshape(len(expected), 3, 2, -1)
                assert (expected[:, :, 0] == expected[:, :, 1]).all(), "an image is two equal frames"
                expected = expected[:, :, 0]
        if "spatial_shapes" in theirs:
            shapes = [tuple(each) for each in theirs["spatial_shapes"].tolist()]
            assert prepared.pictures == tuple(shapes), size
            assert theirs["pixel_attention_mask"].sum(1).tolist() == [rows * columns for rows, columns in shapes]
            expected = np.concatenate(
                [
                    each[: rows * columns].reshape(rows // 2, 2, columns // 2, 2, 16, 3).transpose(0, 2, 1, 3, 5, 4)
                    for each, (rows, columns) in zip(expected, shapes, strict=True)
                ],
                axis=None,
            )
        if "image_position_ids" in theirs:
            columns, rows = (theirs["image_position_ids"][0].max(0).values + 1).tolist()
            assert prepared.pictures == ((rows, columns),), size
            whole = expected[0, : rows * columns].reshape(rows // 2, 2, columns // 2, 2, 16, 3)
            expected = whole.transpose(0, 2, 1, 3, 5, 4)
        if "high_res_pixel_values" in theirs:
            expected = np.concatenate([theirs["high_res_pixel_values"].numpy().ravel(), expected.ravel()])
        expected = expected.reshape(prepared.pixels.shape)
        assert np.abs(prepared.pixels - expected).max() < 1e-5, size


@pytest.mark.parametrize("kind", PUBLISHED)
def test_pixels_are_those_of_the_published_rule(kind: str) -> None:
    ours, family = open_processor(folder_of(kind)), PUBLISHED[kind]()
    assert ours is not None
    for seed, size in enumerate(SIZES):
        image = picture(seed, *size)
        try:
            expected = family.pixels(image)
        except ValueError:
            with pytest.raises(InvalidMessage, match="Cut it"):
                ours.prepare(image, {})
            continue
        prepared = ours.prepare(image, {})
        assert prepared.pixels.shape == expected.shape, size
        assert np.abs(prepared.pixels - expected).max() < 1e-5, size


@pytest.mark.parametrize("kind", PUBLISHED)
def test_lines_are_prepared_or_refused(kind: str) -> None:
    processor = open_processor(folder_of(kind))
    assert processor is not None
    for size in ((3000, 1), (1, 3000)):
        if kind in ("dots_ocr", "kimi_vl", "phi4", "phi4_mm"):
            with pytest.raises(InvalidMessage, match="Cut it"):
                processor.prepare(picture(1, *size), {})
        else:
            assert processor.prepare(picture(1, *size), {}).length > 0


@pytest.mark.parametrize(
    "kind",
    [
        partial(CenterProcessor, length=1, side=336),
        partial(KimiVlProcessor, patch=14, merge=2, max_patches=4096),
    ],
)
def test_a_line_is_not_blown_up(kind: Any) -> None:
    settings = PictureSettings({}, "x")
    options = {} if kind.func is KimiVlProcessor else {"placeholder": ""}
    for size in ((1, 2**22), (2**22, 1)):
        with pytest.raises(InvalidMessage, match="Cut it into several"):
            kind(settings, token_id=1, **options).prepare(Image.new("RGB", size), {})


def test_a_square_around_a_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.vl.processing.pictures.MAX_IMAGE_PIXELS", 2**16)
    processor = PaddedProcessor(PictureSettings({}, "x"), token_id=1, placeholder="", length=1, side=28)
    line = processor.prepare(Image.new("RGB", (2**22, 1), (255, 255, 255)), {}).pixels
    assert line.shape == (1, 3, 28, 28)
    long = processor.prepare(Image.new("RGB", (900, 300), (255, 255, 255)), {}).pixels
    short = processor.prepare(Image.new("RGB", (240, 80), (255, 255, 255)), {}).pixels
    assert np.abs(long - short).mean() < 0.02


def test_both_sizes_are_those_of_the_towers(tmp_path: Path) -> None:
    source = folder_of("deepseek_vl_hybrid")
    fields = json.loads((source / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "high_res_size": 64}))
    with pytest.raises(InvalidCheckpoint, match="64 pixels, and a tower that takes 72"):
        open_processor(tmp_path)


@pytest.mark.parametrize("largest", [False, True])
def test_canvases_of_llama_4(largest: bool, tmp_path: Path) -> None:
    """By torch's resizing too, which is within a level of Pillow's; bfloat16 rounds it once more."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    source = folder_of("llama4")
    fields = json.loads((source / "preprocessor_config.json").read_text())
    fields |= {"max_patches": 16, "resize_to_max_canvas": largest}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    processor, same, torchs = open_processor(tmp_path), llama4_pictures(fields), llama4_pictures(fields, by_torch=True)
    assert processor is not None
    level = (1 / 255 + 2**-8) / min(fields["image_std"]) + 2**-7
    shapes = set()
    for seed, size in enumerate(SIZES):
        image = picture(seed, *size)
        prepared, theirs = processor.prepare(image, {}), same([image])
        assert np.array_equal(prepared.pixels, theirs["pixel_values"].numpy()), size
        assert np.abs(prepared.pixels - torchs([image])["pixel_values"].numpy()).max() < level, size
        rows, columns = theirs["aspect_ratios"][0].tolist()
        shapes.add((rows, columns))
        text = Llama4Processor._prompt_split_image(None, (rows, columns), 1)
        assert prepared.text == text
        assert prepared.placeholder_rows == (4,) * text.count("<|patch|>")
        assert prepared.length == 4 * len(prepared.pixels)
    assert len(shapes) > 4


def test_places_of_lfm2_vl() -> None:
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    processor = open_processor(folder_of("lfm2_vl"))
    assert processor is not None
    names = {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>"}
    texts = SimpleNamespace(
        **{f"{name}_token": text for name, text in names.items()}, image_thumbnail_token="<|img_thumbnail|>"
    )
    tiled = 0
    for seed, size in enumerate(SIZES):
        prepared = processor.prepare(picture(seed, *size), {})
        *tiles, (rows, columns) = prepared.pictures
        grid = [int(each) for each in re.findall(r"row_(\d+)_col_(\d+)", prepared.text)[-1]] if tiles else [1, 1]
        expected = Lfm2VlProcessor._build_image_tokens(texts, *grid, 16, rows * columns // 4, True, True)
        pieces = prepared.text.split("<image>")
        counts = [*prepared.placeholder_rows, 0]
        assert "".join(text + "<image>" * count for text, count in zip(pieces, counts, strict=True)) == expected
        tiled += bool(tiles)
    assert tiled > 5
    for line in ((3000, 1), (1, 3000)):
        with pytest.raises(InvalidMessage, match="Cut it"):
            processor.prepare(picture(1, *line), {})


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_digest_names_what_the_tower_sees(kind: str) -> None:
    processor = open_processor(folder_of(kind))
    assert processor is not None
    digests = [processor.prepare(picture(seed, *size), {}).digest for seed in (1, 2) for size in ((56, 56), (56, 112))]
    assert len(set(digests)) == 4
    assert processor.prepare(picture(1, 56, 56), {}).digest == digests[0]


def test_details_of_what_has_no_choice() -> None:
    image = picture(1, 100, 60)
    for kind in ("llava", "cogvlm", "gemma3", "gemma3_scan", "llava_next"):
        has_low = kind in ("llava", "cogvlm", "gemma3")
        processor = open_processor(folder_of(kind))
        assert processor is not None
        usual = processor.prepare(image, {}).digest
        assert all(processor.prepare(image, {"detail": each}).digest == usual for each in ("auto", "high"))
        if has_low:
            assert processor.prepare(image, {"detail": "low"}).digest == usual
        else:
            with pytest.raises(InvalidParameter, match="no such choice"):
                processor.prepare(image, {"detail": "low"})


def test_bounds_of_pixels() -> None:
    processor = open_processor(folder_of("qwen2_vl"))
    assert processor is not None
    image = picture(1, 100, 60)
    assert processor.prepare(image, {"max_pixels": 1000}).length < processor.prepare(image, {}).length
    with pytest.raises(InvalidParameter, match="own bounds"):
        processor.prepare(image, {"max_pixels": 10**9})
    with pytest.raises(InvalidMessage, match="200 times"):
        processor.prepare(picture(1, 1000, 2), {})


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llava", {"do_normalize": False}),
        ("deepseek_vl", {"do_normalize": False}),
        ("llava", {"do_rescale": False}),
        ("gemma3", {"do_convert_rgb": False}),
        ("glm4v", {"temporal_patch_size": 1}),
    ],
)
def test_settings_that_are_off(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    ours, oracle, image = open_processor(tmp_path), image_processor_of(tmp_path), picture(1, 200, 90)
    assert ours is not None
    expected = oracle([image], return_tensors="pt")["pixel_values"].numpy()
    pixels = ours.prepare(image, {}).pixels
    assert np.abs(pixels - expected.reshape(pixels.shape)).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("qwen2_vl", {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 64, "longest_edge": 4096}}),
        ("qwen2_vl", {"min_pixels": 64, "max_pixels": 4096, "size": {"shortest_edge": None, "longest_edge": None}}),
        ("qwen2_vl", {"min_pixels": None, "max_pixels": None, "size": {"min_pixels": 64, "max_pixels": 4096}}),
        ("llava", {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}),
        ("llava", {"resample": None, "rescale_factor": None, "do_rescale": None, "image_mean": None}),
    ],
)
def test_spellings_of_settings(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """What is null is absent, and whole numbers are numbers."""
    source = folder_of(kind)
    fields = json.loads((source / "preprocessor_config.json").read_text())
    plain = {**fields, "min_pixels": 64, "max_pixels": 4096} if kind == "qwen2_vl" else fields
    if None not in changed.values():
        plain |= {key: [float(each) for each in value] for key, value in changed.items() if key.startswith("image")}
    prepared = []
    for number, each in enumerate((plain, {**fields, **changed})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text((source / "config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(each))
        processor = open_processor(folder)
        assert processor is not None
        prepared.append(processor.prepare(picture(1, 200, 90), {}))
    assert prepared[0].length == prepared[1].length
    assert np.array_equal(prepared[0].pixels, prepared[1].pixels)


@pytest.mark.parametrize(
    "changed",
    [
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
        {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}},
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True},
        {"image_processor_type": "LlavaImageProcessor", "do_pad": False},
    ],
)
def test_image_processors_of_llavas_like(changed: dict[str, Any], tmp_path: Path) -> None:
    source = folder_of("llava")
    fields = json.loads((source / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, **changed}))
    ours, oracle = open_processor(tmp_path), image_processor_of(tmp_path)
    assert ours is not None
    for seed, size in enumerate(SIZES):
        image = picture(seed, *size)
        expected = oracle([image], return_tensors="pt")["pixel_values"].numpy()
        assert np.abs(ours.prepare(image, {}).pixels - expected).max() < 1e-5, size


def test_settings_of_kimis_authors_are_within_an_object(tmp_path: Path) -> None:
    source = folder_of("kimi_k25")
    fields = json.loads((source / "preprocessor_config.json").read_text())
    own = {"in_patch_limit": fields["max_patches"], "patch_limit_on_one_side": 12, "patch_size": 4}
    own |= {key: fields[key] for key in ("image_mean", "image_std")}
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": own}))
    processors = [open_processor(folder) for folder in (source, tmp_path)]
    for size in SIZES:
        digests = {each.prepare(picture(1, *size), {}).digest for each in processors if each is not None}
        assert len(digests) == 1, size


def test_bars_have_the_mean_colour() -> None:
    assert PictureSettings({}, "x", mean=(0.5, 0.5, 0.5)).background == (127, 127, 127)
    assert PictureSettings({"image_mean": [0.48145466, 0.4578275, 0.40821073]}, "x").background == (122, 116, 104)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"resample": 77}, InvalidCheckpoint, "filters"),
        ({"image_mean": [1, 2]}, InvalidCheckpoint, "three numbers"),
        ({"image_std": [0.0, 1.0, 1.0]}, InvalidCheckpoint, "may not be 0"),
        ({"do_resize": False}, UnsupportedModel, "do_resize"),
        ({"do_normalize": "no"}, InvalidCheckpoint, "do_normalize"),
        ({"size": {"shortest_edge": "x"}}, InvalidCheckpoint, "side of a square"),
        (None, InvalidCheckpoint, "no preprocessor_config.json"),
    ],
)
def test_settings_that_are_refused(changed: dict[str, Any] | None, error: type, says: str, tmp_path: Path) -> None:
    source = folder_of("llava")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    if changed is not None:
        fields = json.loads((source / "preprocessor_config.json").read_text())
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, **changed}))
    with pytest.raises(error, match=says):
        open_processor(tmp_path)


@pytest.mark.parametrize("kind", ["aya_vision", "cohere2_vision", "gemma3", "got_ocr2", "internvl", "llama4", "ovis2"])
def test_pictures_have_the_towers_size(kind: str, tmp_path: Path) -> None:
    """A tower takes one size, which two files name."""
    source = folder_of(kind)
    for file in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((source / file).read_text())
    assert open_processor(tmp_path) is not None
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "size": {"height": 36, "width": 36}}))
    with pytest.raises(InvalidCheckpoint, match=r"size = .*the tower's image_size in config"):
        open_processor(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("llava", {"size": {"shortest_edge": 28, "longest_edge": 40}}, "side of a square"),
        ("llava", {"do_center_crop": False}, "not square"),
        ("llava_next", {"image_grid_pinpoints": [[28, 84]]}, "image_grid_pinpoints differ"),
        ("onevision", {"image_grid_pinpoints": [[30, 90]]}, "image_grid_pinpoints differ"),
        ("onevision", {"crop_size": 28}, "crop_size is another"),
        ("deepseek_vl", {"do_pad": False}, "not square"),
        ("janus", {"do_pad": False}, "not square"),
    ],
)
def test_pictures_that_towers_do_not_take(kind: str, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(InvalidCheckpoint, match=says):
        open_processor(tmp_path)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
def test_tokens_of_a_strategy(tower: str, strategy: str, tmp_path: Path) -> None:
    """The default one drops the first token, whatever it is, and only CLIP has one more than patches."""
    shutil.copytree(folder_of("llava"), tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["vision_config"]["model_type"] = tower
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vision_feature_select_strategy": strategy}))
    processor = open_processor(tmp_path)
    assert processor is not None
    expected = 16 + (tower == "clip_vision_model") - (strategy == "default")
    assert processor.prepare(picture(1), {}).length == expected


@pytest.mark.parametrize(("kind", "strategy"), [("llava_next", "full"), ("onevision", "default")])
def test_tiles_have_no_other_tokens_than_patches(kind: str, strategy: str, tmp_path: Path) -> None:
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vision_feature_select_strategy": strategy}))
    with pytest.raises(UnsupportedModel, match="vision_feature_select_strategy"):
        open_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_images_of_minicpm_v_may_have_no_numbers(tmp_path: Path) -> None:
    shutil.copytree(folder_of("minicpm_v_2_6"), tmp_path, dirs_exist_ok=True)
    file, image, texts = tmp_path / "preprocessor_config.json", picture(1, 200, 90), []
    for said in (True, False):
        file.write_text(json.dumps({**json.loads(file.read_text()), "use_image_id": said}))
        processor = open_processor(tmp_path)
        assert processor is not None
        texts.append(processor.prepare(image, {}).text)
    number, _, rest = texts[0].partition("</image_id>")
    assert number.startswith("<image_id>")
    assert "<slice>" in rest == texts[1]
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_feature_size": 7}))
    with pytest.raises(InvalidCheckpoint, match="image_feature_size is another"):
        open_processor(tmp_path)


def test_images_of_command_a_may_stay_whole(tmp_path: Path) -> None:
    shutil.copytree(folder_of("cohere2_vision"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "crop_to_patches": False}))
    processor = open_processor(tmp_path)
    assert processor is not None
    assert processor.prepare(picture(1, 100, 60), {}).pixels.shape == (1, 3, 28, 28)


def test_an_image_is_padded_as_llavas_authors_do(tmp_path: Path) -> None:
    fields, _ = original_llava(json.loads((folder_of("llava") / "config.json").read_text()), {})
    tower = fields.pop("vit/tiny")
    (tmp_path / "vit/tiny").mkdir(parents=True)
    (tmp_path / "vit/tiny/config.json").write_text(json.dumps(tower))
    (tmp_path / "config.json").write_text(json.dumps({**fields, "image_aspect_ratio": "pad"}))
    processor = open_processor(tmp_path)
    assert processor is not None
    assert (processor.placeholder, processor.token_id) == ("<unk>\n", 0)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    for width, height in SIZES:
        image, side = picture(1, width, height), max(width, height)
        square = Image.new("RGB", (side, side), tuple(int(each * 255) for each in mean))
        square.paste(image, (0, (side - height) // 2) if width > height else ((side - width) // 2, 0))
        expected = (np.asarray(square.resize((28, 28), Image.Resampling.BICUBIC)) / 255 - mean) / std
        prepared = processor.prepare(image, {})
        assert prepared.length == 16
        assert np.abs(prepared.pixels[0] - expected.transpose(2, 0, 1)).max() < 1e-5, (width, height)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llava", {"vision_config": [1]}),
        ("llava", {"vision_config": {"image_size": "x"}}),
        ("got_ocr2", {"vision_config": {"image_size": 64, "patch_size": 0}}),
        ("qwen2_5_omni", {"thinker_config": "x"}),
        ("onevision", {"vision_aspect_ratio": "anyres_max_x"}),
        ("llava", {"vision_config": {"image_size": 56, "patch_size": 7}}),
        ("onevision", {"vision_config": {"image_size": 14, "patch_size": 7}}),
        ("idefics3", {"vision_config": {"image_size": 88, "patch_size": 4}}),
        ("deepseek_vl", {"vision_config": {"image_size": 56, "patch_size": 7}}),
        ("janus", {"vision_config": {"image_size": 56, "patch_size": 7}}),
        ("qwen2_vl", {"vision_config": {"patch_size": 5}}),
        ("qwen2_5_omni", {"thinker_config": {"vision_config": {"spatial_merge_size": 3}}}),
        ("lfm2_vl", {"vision_config": {"patch_size": 8}}),
        ("lfm2_vl", {"downsample_factor": 1}),
        ("kimi_vl", {"vision_config": {"patch_size": 8}}),
        ("kimi_k25", {"vision_config": {"patch_size": 8}}),
        ("minicpm_v_2_6", {"vision_config": {"patch_size": 14}}),
        ("gemma4_vision", {"vision_config": {"patch_size": 4, "pooling_kernel_size": 1}}),
    ],
)
def test_what_a_damaged_config_says_of_images(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    source = folder_of(kind)
    fields = json.loads((source / "config.json").read_text())
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**fields, **changed}))
    with pytest.raises(InvalidCheckpoint, match="are not those of"):
        open_processor(tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_vl", "deepseek_vl_hybrid"])
def test_pictures_of_deepseeks_authors(kind: str, tmp_path: Path) -> None:
    """Sides are rounded down, and the smaller of two pictures is made of the larger one."""
    source = folder_of(kind)
    fields, _ = original_deepseek(json.loads((source / "config.json").read_text()), {})
    low, large = {"pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}, 72 if kind.endswith("hybrid") else 28
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    if large == 72:
        fields["vision_config"]["params"]["low_res_cfg"] |= low
        fields["vision_config"]["params"]["high_res_cfg"] |= {"pixel_mean": mean, "pixel_std": std}
    pictures = {"image_processor_type": "VLMImageProcessor", "image_size": large, "min_size": 14}
    pictures |= {"image_mean": mean, "image_std": std, "do_normalize": large == 28}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    processor = open_processor(tmp_path)
    assert processor is not None
    for seed, (width, height) in enumerate(SIZES):
        image, longest = picture(seed, width, height), max(width, height)
        size = [max(int(each / longest * large), 14) for each in (width, height)]
        square = Image.new("RGB", (max(size), max(size)), tuple(int(each * 255) for each in mean))
        square.paste(
            image.resize(size, Image.Resampling.BICUBIC), ((max(size) - size[0]) // 2, (max(size) - size[1]) // 2)
        )
        whole = torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255
        expected = ((whole - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]).numpy().ravel()
        seen = processor.prepare(image, {}).pixels.ravel()
        assert np.abs(seen[: len(expected)] - expected).max() < 1e-5, (width, height)
        if large == 72:
            small = F.interpolate(whole[None], (28, 28), mode="bilinear", antialias=True).numpy().ravel()
            # Pillow rounds to whole levels.
            assert np.abs(seen[len(expected) :] - (small - 0.5) / 0.5).max() < 2 / 255, (width, height)


def test_numbers_come_as_towers_take_them() -> None:
    processor = open_processor(folder_of("llava"))
    assert processor is not None
    pixels = processor.prepare(picture(1), {}).pixels
    assert pixels.dtype == np.float32
    assert torch.from_numpy(pixels).shape == (1, 3, 28, 28)
