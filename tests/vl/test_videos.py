"""Videos as lists of frames: their tokens, positions and features against transformers, and what is refused."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidMessage, InvalidParameter
from asyncllm.agent.image_features import ImageFeatures
from asyncllm.vl.processor import open_processor
from tests.server.serving import serving
from tests.vl.checkpoints import folder_of, image_processor_of, picture
from tests.vl.tiny_parts import IMAGE_ID

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VIDEO_ID = IMAGE_ID + 3
GREEDY = GenerationConfig(max_new_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
CONFIG = EngineConfig(block_size=8, num_gpu_blocks=128, max_prefill_token_num=24)
INVARIANT = msgspec.structs.replace(CONFIG, batch_invariant=True)


def frames_of(count: int, first: int = 10, size: tuple[int, int] = (40, 32)) -> list[Image.Image]:
    return [picture(first + index, *size) for index in range(count)]


def asked(*media: Any, text: str = "what happens?") -> list[dict[str, Any]]:
    parts = [{"type": "video", "video": {"frames": each}} if isinstance(each, list) else each for each in media]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def expected_logprobs(kind: str, ids: list[int], num_prompt: int, shown: list[Any], fps: float) -> torch.Tensor:
    """Return transformers' log-probabilities of the tokens behind a prompt of images and lists of frames, whose pixels
    are made as its own processor makes them."""
    folder = folder_of(kind)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    patch, merge = 4, 2
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    if kind == "qwen3_vl":
        mean, std = np.full(3, 0.5), np.full(3, 0.5)
    arguments: dict[str, list[Any]] = {"pixel_values": [], "image_grid_thw": []}
    videos: dict[str, list[Any]] = {"pixel_values_videos": [], "video_grid_thw": []}
    for each in shown:
        frames = each if isinstance(each, list) else [each, each]
        frames = [*frames, frames[-1]] if len(frames) % 2 else frames
        numbers = (np.stack([np.asarray(frame) for frame in frames]) / 255 - mean) / std
        count, height, width, _ = numbers.shape
        grid = (count // 2, height // patch, width // patch)
        # As Qwen2VLVideoProcessor cuts: squares of merged patches, and in each colours, frames, rows, columns.
        cut = numbers.transpose(0, 3, 1, 2).reshape(
            grid[0], 2, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
        )
        flat = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(grid[0] * grid[1] * grid[2], -1)
        target, names = (
            (videos, ("pixel_values_videos", "video_grid_thw"))
            if isinstance(each, list)
            else (
                arguments,
                ("pixel_values", "image_grid_thw"),
            )
        )
        target[names[0]].append(torch.tensor(flat, dtype=torch.float32))
        target[names[1]].append(torch.tensor(grid))
    given = {
        name: torch.cat(values) if name.startswith("pixel") else torch.stack(values)
        for name, values in (arguments | videos).items()
        if values
    }
    if kind == "qwen2_5_vl" and "video_grid_thw" in given:
        given["second_per_grid_ts"] = torch.tensor([2 / fps] * len(given["video_grid_thw"]))
    inputs = torch.tensor([ids])
    kinds = (inputs == IMAGE_ID).int() + 2 * (inputs == VIDEO_ID).int()
    with torch.inference_mode():
        logits = model(input_ids=inputs, mm_token_type_ids=kinds, **given).logits[0]
    return torch.log_softmax(logits[num_prompt - 1 : -1], -1)


@pytest.mark.parametrize("kind", KINDS)
async def test_videos_and_images_equal_transformers(kind: str) -> None:
    # In transformers 5 the text behind a video goes on behind its longer side even if its time is longer, and not so
    # what is generated. Where no time is longer than the side, that is what the models were published with.
    fps = 8.0
    video, image = frames_of(6), picture(1, 48, 32)
    prompt = [
        {
            "role": "user",
            "content": [
                {"type": "video", "video": {"frames": video, "fps": fps}},
                {"type": "text", "text": "and"},
                {"type": "image", "image": image},
                {"type": "video_url", "video_url": {"url": frames_of(3, 30), "fps": fps}},
            ],
        }
    ]
    async with AsyncEngine(str(folder_of(kind)), CONFIG) as engine:
        (ids,) = await engine.encode([prompt])  # type: ignore[list-item, misc]
        answer = await engine.generate(prompt, GREEDY)
        again = await engine.generate(prompt, GREEDY)
        assert again.token_ids == answer.token_ids
        assert again.cached_token_len > len(ids) - 16  # type: ignore[arg-type]
        assert (answer.num_images, answer.image_token_len) == (3, 20 * 3 + 24 + 20 * 2)
        assert ids.count(VIDEO_ID) == 100  # type: ignore[union-attr]
        assert answer.logprobs is not None
        shown = [video, image, frames_of(3, 30)]
        expected = expected_logprobs(kind, [*ids, *answer.token_ids], len(ids), shown, fps)  # type: ignore[misc, arg-type]
        assert expected.argmax(-1).tolist() == answer.token_ids
        for index, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            assert abs(expected[index, token].item() - entry[token]) < 1e-4
        swapped = [video[::-1], *shown[1:]]
        other = expected_logprobs(kind, [*ids, *answer.token_ids], len(ids), swapped, fps)  # type: ignore[misc, arg-type]
        assert (other - expected).abs().max() > 1e-3, "the oracle would notice another order of frames"
        engine.check_idle()


async def test_time_counts_where_the_family_counts_it() -> None:
    """Later answers compute fewer rows, because blocks are cached, and only invariant rows have the same bits then."""
    answers: dict[str, list[Any]] = {}
    for kind in KINDS:
        async with AsyncEngine(str(folder_of(kind)), INVARIANT) as engine:
            for fps in (1.0, 4.0):
                prompt = asked({"type": "video", "video": {"frames": frames_of(4), "fps": fps}})
                answers.setdefault(kind, []).append(await engine.generate(prompt, GREEDY))
            slow = await engine.generate(asked(frames_of(4)), GREEDY, mm_processor_kwargs={"fps": 1.0})
            assert slow.logprobs == answers[kind][0].logprobs
    assert answers["qwen3_vl"][0].logprobs != answers["qwen3_vl"][1].logprobs
    assert answers["qwen2_vl"][0].logprobs == answers["qwen2_vl"][1].logprobs
    assert answers["qwen2_5_vl"][0].logprobs != answers["qwen2_5_vl"][1].logprobs
    assert answers["qwen2_5_vl"][1].cached_token_len < 16, "another time is another video"


def test_a_long_video_moves_the_text_behind_it() -> None:
    processor: Any = open_processor(folder_of("qwen2_5_vl"))
    prepared = processor.prepare_video(frames_of(8), {"fps": 2.0})
    assert (prepared.steps, prepared.grid, prepared.length) == (4, (4, 5), 80)
    assert prepared.interval == 4.0
    assert prepared.shift == 13 - 80, "the last step is at 12"
    odd = processor.prepare_video(frames_of(7), {})
    assert odd.steps == 4
    assert np.array_equal(odd.pixels[-20 * 4 :, :, 0], odd.pixels[-20 * 4 :, :, 1])


@pytest.mark.parametrize(("count", "grid"), [(3, (8, 4)), (4, (7, 4)), (5, (6, 3))])
def test_an_odd_number_of_frames_is_scaled_by_itself(count: int, grid: tuple[int, int]) -> None:
    """As Qwen3VLVideoProcessor scales: a side by sqrt(max_pixels / (frames * height * width)), rounded down."""
    processor: Any = open_processor(folder_of("qwen3_vl"))
    prepared = processor.prepare_video(frames_of(count, size=(111, 197)), {"max_pixels": 8192})
    scale = (8192 / (count * 111 * 197)) ** 0.5
    assert prepared.grid == grid == (int(197 * scale / 8), int(111 * scale / 8))
    assert prepared.steps == (count + 1) // 2


async def test_wrong_videos_are_refused() -> None:
    async with AsyncEngine(str(folder_of("qwen2_vl")), CONFIG) as engine:
        mixed = [picture(1), picture(2, 80, 40)]
        for frames, options, error, says in (
            (mixed, {}, InvalidMessage, "of one size"),
            (frames_of(2), {"fps": 0}, InvalidParameter, "fps=0"),
            (frames_of(2), {"fps": True}, InvalidParameter, "fps=True"),
            (frames_of(2), {"detail": "low"}, InvalidParameter, "unknown option 'detail'"),
            (frames_of(2), {"max_pixels": 1}, InvalidParameter, "max_pixels=1"),
            ([b"x"], {}, InvalidMessage, "no format"),
        ):
            with pytest.raises(error, match=says):
                await engine.generate(asked({"type": "video", "video": {"frames": frames, **options}}), GREEDY)
        with pytest.raises(InvalidMessage, match="beside a video"):
            await engine.generate(
                asked(frames_of(2), {"type": "image", "image": picture(1)}, text="<IMAGE_TOKEN>"), GREEDY
            )
        engine.check_idle()


async def test_a_video_over_http() -> None:
    engine = AsyncEngine(str(folder_of("qwen2_vl")), CONFIG)
    urls = []
    for frame in frames_of(4):
        buffer = BytesIO()
        frame.save(buffer, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    async with serving(engine) as server:
        expected = await engine.generate(asked(frames_of(4)), GREEDY)
        body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        messages = asked({"type": "video_url", "video_url": {"url": urls}})
        status, answer = await server.post("/v1/chat/completions", {"messages": messages, **body})
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 40
        for wrong, says in (
            ("https://example.com/x.mp4", "does not fetch images from"),
            ("/etc/passwd", "Files of the server are not read"),
            ("DATA:video/mp4;base64,AAAA", "no container"),
            (["/etc/passwd"], "None is fetched"),
            (["http://127.0.0.1/x.png"], "None is fetched"),
            ("data:video/mp4,x", "Encode the file as base64"),
            ("data:video/mp4;base64,AAAA", "no container"),
        ):
            messages = asked({"type": "video_url", "video_url": {"url": wrong}})
            status, answer = await server.post("/v1/chat/completions", {"messages": messages, **body})
            assert status == 400
            assert says in answer["error"]["message"]
        engine.check_idle()


async def test_a_frame_of_onevision_has_a_quarter_of_the_tokens() -> None:
    """Its features are shrunk, and one token is behind those of all frames."""
    folder, frames = folder_of("onevision"), frames_of(3, size=(30, 30))
    async with AsyncEngine(str(folder), CONFIG) as engine:
        prompt = asked(frames, {"type": "image", "image": picture(1, 30, 30)})
        (ids,) = await engine.encode([prompt])  # type: ignore[list-item, misc]
        answer = await engine.generate(prompt, GREEDY)
        engine.check_idle()
    assert isinstance(ids, list)
    assert ids.count(IMAGE_ID + 1) == 3 * 4 + 1
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pictures = image_processor_of(folder)([picture(1, 30, 30)], return_tensors="pt")
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    shown = (np.stack([np.asarray(frame) for frame in frames]) / 255 - mean) / std

    def expected(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
        videos = torch.tensor(pixels.transpose(0, 3, 1, 2)[None], dtype=torch.float32)
        with torch.inference_mode():
            inputs = torch.tensor([[*ids, *answer.token_ids]])
            logits = model(input_ids=inputs, pixel_values_videos=videos, **pictures).logits[0]
        return torch.log_softmax(logits[len(ids) - 1 : -1], -1)

    assert answer.logprobs is not None
    right, reversed_ = expected(shown), expected(shown[::-1].copy())
    for index, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert abs(right[index, token].item() - entry[token]) < 1e-4
    assert (right - reversed_).abs().max() > 1e-3, "the oracle would notice another order of frames"


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
async def test_steps_are_encoded_as_they_are_reached(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt has the tower see the steps of a video that it reaches into, each once."""
    encode, counts = ImageFeatures._encoded, []

    def counted(self: ImageFeatures, images: Any) -> Any:
        counts.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(ImageFeatures, "_encoded", counted)
    async with AsyncEngine(str(folder_of(kind)), CONFIG) as engine:
        answer = await engine.generate(asked(frames_of(8)), GREEDY)
        assert answer.num_images == 1
        engine.check_idle()
    assert sum(counts) == {"qwen3_vl": 4, "internvl": 8}[kind]
    assert max(counts) <= 3
    assert len([count for count in counts if count]) > 2
