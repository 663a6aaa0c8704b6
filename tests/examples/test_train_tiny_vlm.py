"""The pictures and questions of tiny-vlm, the network that learns them, and the folder that its training writes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from train_tiny_chat.export import rounded_weights
from train_tiny_chat.network import Shape as TextShape
from train_tiny_vlm.evaluation import exact_answers, normalized, text_questions, visual_questions
from train_tiny_vlm.export import export_checkpoint
from train_tiny_vlm.network import TowerShape, VisionNetwork
from train_tiny_vlm.rows import IMAGES_PER_UNIT, LENGTH, UNIT, file_batches, make_batches
from train_tiny_vlm.scenes import COLOURS, MOST_SHAPES, SIDE, draw_scene, is_held_out, model_picture, picture
from train_tiny_vlm.skills import GOALS, SKILLS, TWO_IMAGES, VisualQuestion, held_out_questions
from train_tiny_vlm.tokenizer import IMAGE, image_tokenizer

from asyncllm import GenerationConfig, pipeline
from asyncllm.locate import ASSETS
from asyncllm.vl.processor import open_processor
from tests.checkpoints import perturb

TINY_VLM = ASSETS / "tiny-vlm"
needs_model = pytest.mark.skipif(not TINY_VLM.is_dir(), reason="the bundled tiny-vlm is not here")


def test_shapes_do_not_touch_and_lie_within_the_picture() -> None:
    random = Random(1)
    for _ in range(60):
        shapes = draw_scene(random, held_out=bool(random.getrandbits(1))).shapes
        assert 1 <= len(shapes) <= MOST_SHAPES
        for index, shape in enumerate(shapes):
            assert shape.radius <= min(shape.x, shape.y, 1 - shape.x, 1 - shape.y)
            for other in shapes[index + 1 :]:
                distance = ((shape.x - other.x) ** 2 + (shape.y - other.y) ** 2) ** 0.5
                assert distance > shape.radius + other.radius


def test_the_hold_out_rule_looks_at_what_is_shown_alone() -> None:
    random = Random(2)
    scenes = [draw_scene(random, 2, held_out=held_out) for held_out in (False, True) for _ in range(150)]
    assert [is_held_out(scene) for scene in scenes] == [False] * 150 + [True] * 150
    assert not {scene.content for scene in scenes[:150]} & {scene.content for scene in scenes[150:]}


def test_a_picture_has_the_colours_of_its_shapes() -> None:
    random = Random(3)
    for _ in range(12):
        scene = draw_scene(random, held_out=False)
        image = picture(scene, random, width=2 * SIDE, height=2 * SIDE)
        for shape in scene.shapes:
            # Every kind covers its middle.
            pixel = np.array(image.getpixel((int(shape.x * image.width), int(shape.y * image.height))), np.int64)
            nearest = min(COLOURS, key=lambda name: int(np.abs(pixel - _rgb(name)).sum()))
            assert nearest == shape.colour


def _rgb(name: str) -> np.ndarray:
    return np.array(Image.new("RGB", (1, 1), name).getpixel((0, 0)), np.int64)


def test_answers_are_what_the_scene_shows() -> None:
    random = Random(4)
    asked: Counter[str] = Counter()
    for _ in range(200):
        scene = draw_scene(random, held_out=False)
        for skill, ask in SKILLS.items():
            answered = ask(random, scene)
            if answered is None:
                assert skill in ("colour_of", "shape_of")
                continue
            asked[skill] += 1
            if skill.startswith("count"):
                match = re.fullmatch(r"There (?:is|are) (\d+|no) (?:(\w+) )?(\w+?)s?\.", answered.answer)
                assert match is not None
                number, colour, kind = match.groups()
                count = scene.count(colour, None if kind == "shape" else kind)
                assert count == (0 if number == "no" else int(number))
            elif skill == "colour_of":
                kind, colour = answered.answer.removeprefix("The ").removesuffix(".").split(" is ")
                assert scene.count(colour, kind) == scene.count(kind=kind) == 1
            elif skill == "shape_of":
                match = re.fullmatch(r"The (\w+) shape is a (\w+)\.", answered.answer)
                assert match is not None
                assert scene.count(match[1], match[2]) == scene.count(colour=match[1]) == 1
            elif skill == "describe":
                listed = re.findall(r"(\d) (\w+) (\w+?)s?\b", answered.answer)
                assert sum(int(number) for number, _, _ in listed) == len(scene.shapes)
                assert all(scene.count(colour, kind) == int(number) for number, colour, kind in listed)
    assert min(asked.values()) > 80


def test_held_out_questions_are_repeatable_and_of_every_skill() -> None:
    questions = visual_questions(3, seed=5)
    again, other = visual_questions(3, seed=5), visual_questions(3, seed=6)
    assert [question.question for question in questions] == [question.question for question in again]
    assert [question.answer for question in questions] != [question.answer for question in other]
    assert questions[0].images[0].tobytes() == again[0].images[0].tobytes()
    assert Counter(question.skill for question in questions) == dict.fromkeys((*SKILLS, TWO_IMAGES), 3)
    assert GOALS.keys() <= {question.skill for question in questions}
    assert all(len(question.images) == 1 + (question.skill == TWO_IMAGES) for question in questions)
    assert "tiny-chat" not in str([question.messages for question in text_questions(20, seed=0)])


def test_rows_keep_images_and_tokens_together(tmp_path: Path) -> None:
    tokenizer = image_tokenizer(ASSETS / "tiny-chat")
    batches = make_batches(tokenizer, "7/test", 2, 64, 5)
    image = tokenizer.token_to_id(IMAGE)
    assert batches.tokens.shape == batches.kinds.shape == (2 * UNIT, LENGTH)
    assert batches.pixels.shape == (2 * IMAGES_PER_UNIT, SIDE, SIDE, 3)
    images = (batches.tokens == image).sum(1).reshape(2, UNIT)
    assert (images == images[0]).all()
    assert set(images[0].tolist()) == {0, 64, 128}
    assert images.sum() == 64 * len(batches.pixels)
    assert not batches.kinds[batches.tokens == image].max() > 1  # no image is learned as an answer
    filed = file_batches(tokenizer, "7/test", 2, 64, 5, tmp_path).load()
    assert np.array_equal(filed.tokens, batches.tokens)
    assert np.array_equal(filed.pixels, batches.pixels)
    assert not list(tmp_path.iterdir())


def test_the_written_folder_answers_in_asyncllm_as_the_network_does(tmp_path: Path) -> None:
    tokenizer = image_tokenizer(ASSETS / "tiny-chat")
    network = VisionNetwork(
        TowerShape(hidden=128, layers=2, heads=2, intermediate=128),
        TextShape(hidden=128, layers=2, heads=2, key_value_heads=1, intermediate=128),
        tokenizer.token_to_id(IMAGE),
    )
    perturb(network, 0)
    network.load_state_dict(rounded_weights(network))
    export_checkpoint(network, tokenizer, tmp_path)
    questions = held_out_questions("describe", 2, seed=0) + held_out_questions(TWO_IMAGES, 2, seed=0)
    with pipeline(str(tmp_path)) as pipe:
        answers = pipe(
            [(question.question, list(question.images)) for question in questions],
            GenerationConfig(top_k=1, max_new_tokens=5, ignore_eos=True),
        )
        assert isinstance(answers, list)
    for question, answer in zip(questions, answers, strict=True):
        shown = f"{IMAGE * 64}\n" * len(question.images)
        text = f"<|bos|><|im_start|>user\n{shown}{question.question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert answer.input_token_len == len(ids)
        pictures = np.stack([np.asarray(model_picture(image)) for image in question.images])
        with torch.no_grad():
            logits = network(torch.tensor([[*ids, *answer.token_ids]]), normalized(torch.from_numpy(pictures)))
        # The checkpoint's weights are of 16 bits and are computed with as such.
        taken = logits[0, len(ids) - 1 : -1].log_softmax(-1)
        best = taken.max(-1).values
        chosen = taken.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (best - chosen).max() < 0.1


def test_transformers_reads_the_written_folder_as_the_network(tmp_path: Path) -> None:
    from transformers import LlavaForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = image_tokenizer(ASSETS / "tiny-chat")
    network = VisionNetwork(TowerShape(layers=2), TextShape(layers=1), tokenizer.token_to_id(IMAGE))
    perturb(network, 1)
    network.load_state_dict(rounded_weights(network))
    export_checkpoint(network, tokenizer, tmp_path)
    model, loaded = LlavaForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    tokens, pixels = torch.tensor([[1, 3, *[5] * 64, 70, 71]]), torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = model(input_ids=tokens, pixel_values=pixels).logits
        assert torch.allclose(network(tokens, pixels), expected, atol=1e-3)


def test_a_wrong_picture_changes_what_the_network_answers() -> None:
    tokenizer = image_tokenizer(ASSETS / "tiny-chat")
    network = VisionNetwork(TowerShape(layers=1), TextShape(layers=1), tokenizer.token_to_id(IMAGE))
    perturb(network, 0)
    question = VisualQuestion("count", (Image.new("RGB", (SIDE, SIDE), "red"),), "How many?", "x")
    assert exact_answers(network, tokenizer, [question]) == [False]
    tokens = torch.tensor([[5] * 64 + [70]])
    pictures = [normalized(torch.full((1, SIDE, SIDE, 3), value, dtype=torch.uint8)) for value in (10, 240)]
    with torch.no_grad():
        first, second = (network(tokens, pixels) for pixels in pictures)
    assert (first - second).abs().max() > 0.1


def test_the_preprocessor_makes_of_a_picture_what_training_did(tmp_path: Path) -> None:
    tokenizer = image_tokenizer(ASSETS / "tiny-chat")
    network = VisionNetwork(TowerShape(layers=1), TextShape(layers=1), tokenizer.token_to_id(IMAGE))
    export_checkpoint(network, tokenizer, tmp_path)
    processor = open_processor(tmp_path)
    assert processor is not None
    random = Random(8)
    for width, height in ((SIDE, SIDE), (300, 200)):
        image = picture(draw_scene(random, held_out=False), random, width=width, height=height)
        prepared = processor.prepare(image, {})
        expected = normalized(torch.from_numpy(np.asarray(model_picture(image))[None].copy()))
        assert np.abs(prepared.pixels - expected.numpy()).max() < 1e-5


@needs_model
def test_the_bundled_model_is_small_and_answers() -> None:
    assert sum(file.stat().st_size for file in TINY_VLM.iterdir()) < 13_000_000
    image = Image.new("RGB", (224, 224), "white")
    drawing = ImageDraw.Draw(image)
    drawing.ellipse((20, 20, 90, 90), fill="red")
    drawing.rectangle((120, 30, 190, 100), fill="blue")
    drawing.ellipse((60, 130, 120, 190), fill="blue")
    questions = {
        "How many shapes are there?": "There are 3 shapes.",
        "How many blue shapes are there?": "There are 2 blue shapes.",
        "What colour is the square?": "The square is blue.",
        "What shape is red?": "The red shape is a circle.",
    }
    with pipeline(str(TINY_VLM)) as pipe:
        answers = pipe([(question, image) for question in questions], GenerationConfig(top_k=1))
        assert isinstance(answers, list)
        assert [answer.text for answer in answers] == list(questions.values())
        assert pipe("What is 17 + 25?", GenerationConfig(top_k=1)).text == "17 + 25 = 42."
