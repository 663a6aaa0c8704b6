"""Images in the engine: prefix cache by content, recomputation, sessions, several answers, wrong prompts."""

from __future__ import annotations

import base64
from asyncio import TaskGroup
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from asyncllm import (
    AsyncEngine,
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    InvalidMessage,
    InvalidParameter,
    Response,
    UnsupportedFeature,
)
from asyncllm.agent.image_features import ImageFeatures
from asyncllm.prompt_image import PromptImage
from asyncllm.text.prompts import is_single
from asyncllm.vl import IMAGE_TOKEN
from tests.vl.checkpoints import folder_of, greedy, picture, worst_difference

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

KIND = "llava"
GREEDY = greedy()


def config(**more: Any) -> EngineConfig:
    return EngineConfig(**{"block_size": 4, "num_gpu_blocks": 256, "max_prefill_token_num": 64, **more})


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(str(folder_of(KIND)), config()) as engine:
        yield engine
        engine.check_idle()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the tower has encoded."""
    counts: list[int] = []
    encode = ImageFeatures._encoded

    def counted(self: ImageFeatures, images: list[PromptImage]) -> Any:
        counts.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(ImageFeatures, "_encoded", counted)
    return counts


def message(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_data", "image_data": {"data": image}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["smolvlm", "ovis2", "aya_vision", "pixtral"])
async def test_templates_of_parts_have_the_familys_places(kind: str) -> None:
    """What stands for one image there is one token, in the place of which the family has rows and columns of them."""
    sources = ("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}", PARTS)
    ids = []
    for source in sources:
        template = ChatTemplateConfig(chat_template=source)
        async with AsyncEngine(str(folder_of(kind)), config(), chat_template_config=template) as engine:
            ids.append(await engine.encode(message("what?", picture(1, 90, 60), picture(2))))
    assert ids[0] == ids[1]
    assert len(ids[0]) > 20


@pytest.mark.parametrize("kind", ["gemma4", "kimi_k25"])
async def test_an_image_has_the_space_that_the_template_writes_around_it(kind: str) -> None:
    place = {
        "gemma4": r"\n\n<|image|>\n\n",
        "kimi_k25": r"<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
    }
    parts = (
        "{% for part in m.content %}{% if part.type == 'image' %}{{ '" + place[kind] + "' }}"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    )
    text = "{{ m.content }}{% else %}"
    sources = (
        "{% for m in messages %}{{ m.role }}:" + parts + "{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}" + text + parts + "{% endif %}{% endfor %}",
    )
    ids = []
    for source in sources:
        template = ChatTemplateConfig(chat_template=source)
        async with AsyncEngine(str(folder_of(kind)), config(), chat_template_config=template) as engine:
            ids.append(await engine.encode(message("what?", picture(1), picture(2))))
            newlines = await engine.encode("\n\n", do_preprocess=False, add_bos=False)
    assert ids[0] == ids[1]
    assert set(newlines) & set(ids[0])


async def test_equal_images_share_blocks_and_others_never(engine: AsyncEngine, encoded: list[int]) -> None:
    prompt = message("what is it?", picture(1))
    first = await engine.generate(prompt, GREEDY)
    again = await engine.generate(message("what is it?", picture(1)), GREEDY)
    other = await engine.generate(message("what is it?", picture(2)), GREEDY)
    assert first.cached_token_len == 0
    assert again.cached_token_len >= 20, "the image is found by its content"
    assert again.token_ids == first.token_ids
    assert other.cached_token_len < 16, "no more than what stands in front of the image"
    for image, response in ((picture(1), again), (picture(2), other)):
        ids = await engine.encode(message("what is it?", image))
        assert worst_difference(KIND, ids, [image], response) < 1e-4  # type: ignore[arg-type]
    assert sum(encoded) == 2, "a prompt that the prefix cache has is encoded once"


async def test_the_place_of_an_image_counts(engine: AsyncEngine) -> None:
    one, two = picture(1), picture(2)
    forward = await engine.generate(("x", [one, two]), GREEDY)
    backward = await engine.generate(("x", [two, one]), GREEDY)
    assert backward.cached_token_len < 16
    ids = await engine.encode(("x", [two, one]))
    assert worst_difference(KIND, ids, [two, one], backward) < 1e-4  # type: ignore[arg-type]
    assert forward.logprobs != backward.logprobs


@pytest.mark.parametrize(("kind", "copied"), [("llava", 0), ("qwen2_5_vl", 80), ("cogvlm2", 0)])
async def test_answers_survive_preemption(kind: str, copied: int) -> None:
    """By computing again, and by copies of so many blocks to the host and back."""
    images = [picture(seed) for seed in range(4)]
    long = greedy(40)
    way: Any = {"eviction_type": "copy", "num_cpu_blocks": copied} if copied else {}
    crowded = config(num_gpu_blocks=40, enable_prefix_caching=False, **way)
    async with AsyncEngine(str(folder_of(kind)), crowded) as engine:
        responses = await engine.batch_infer([(f"number {n}", image) for n, image in enumerate(images)], long)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.blocks_swapped_in > 0) == (copied > 0)
        assert isinstance(responses, list)
        for number, (image, response) in enumerate(zip(images, responses, strict=True)):
            ids = await engine.encode((f"number {number}", image))
            assert worst_difference(kind, ids, [image], response) < 1e-4  # type: ignore[arg-type]
        engine.check_idle()


async def test_several_answers_and_a_stream(engine: AsyncEngine) -> None:
    sampled = GenerationConfig(n=3, max_new_tokens=4, temperature=1.0, random_seed=5, ignore_eos=True)
    response = await engine.generate(("say", picture(3)), sampled)
    assert len(response.choices) == 3
    pieces = [chunk async for chunk in engine.stream_infer([("say", picture(3)), "text alone"], GREEDY)]
    assert {chunk.index for chunk in pieces} == {0, 1}


SESSIONS = [
    *("llava", "llava_next", "qwen2_vl", "pixtral", "idefics3", "gemma3_scan", "llama4"),
    *("cogvlm2", "glm4v_9b", "minicpm_v_2_6", "phi4", "xcomposer2"),
]


@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_session_keeps_its_images(kind: str) -> None:
    async with AsyncEngine(str(folder_of(kind)), config()) as engine, engine.session() as session:
        await session.chat(("what is it?", picture(1)), GREEDY)
        await session.chat("and its colour?", GREEDY)
        before = list(session.token_ids)
        third = await session.chat(("and this one?", picture(2)), GREEDY)
        assert third.cached_token_len >= len(before) - 8, "the first image is found by its content"
        ids = session.token_ids[: -len(third.token_ids)]
        assert worst_difference(kind, ids, [picture(1), picture(2)], third) < 1e-4
        async with session.fork() as other:
            fourth = await other.chat("again", GREEDY)
            ids = other.token_ids[: -len(fourth.token_ids)]
            assert worst_difference(kind, ids, [picture(1), picture(2)], fourth) < 1e-4


async def test_images_are_counted() -> None:
    async with AsyncEngine(str(folder_of("llava")), config()) as engine, engine.session() as session:
        text = await engine.generate("say", GREEDY)
        assert (text.num_images, text.image_token_len) == (0, 0)
        two = GenerationConfig(n=2, max_new_tokens=2, temperature=1.0, ignore_eos=True)
        several = await engine.generate(("say", [picture(1), picture(2)]), two)
        assert [(each.num_images, each.image_token_len) for each in several.choices] == [(2, 32)] * 2
        await session.chat(("say", picture(1)), GREEDY)
        second = await session.chat(("and this", picture(2)), GREEDY)
        assert (second.num_images, second.image_token_len) == (2, 32), "those of the history too"


async def test_a_request_says_how_its_images_are_prepared() -> None:
    image = picture(1, 120, 60)
    async with AsyncEngine(str(folder_of("internvl")), config()) as engine:

        async def tokens(options: Any, part: Any = None) -> int:
            shown = {"type": "image", "image": {"data": image, **(part or {})}}
            prompt = [{"role": "user", "content": [shown, {"type": "text", "text": "what?"}]}]
            encoded = await engine.encode([prompt], mm_processor_kwargs=options)  # type: ignore[list-item]
            answer = await engine.generate(prompt, GREEDY, mm_processor_kwargs=options)
            assert answer.input_token_len == len(encoded[0])  # type: ignore[arg-type]
            return answer.image_token_len

        usual = await tokens(None)
        assert await tokens({"max_dynamic_patch": 1}) == await tokens({"detail": "low"}) == 4 < usual
        assert await tokens({}) == await tokens({"detail": "low"}, {"detail": "high"}) == usual
        for options, says in (({"size": 3}, "entry 'size'"), ({"min_pixels": 3}, "no such choice")):
            with pytest.raises(InvalidParameter, match=says):
                await engine.generate(("what?", image), GREEDY, mm_processor_kwargs=options)
        assert (await engine.generate("what?", GREEDY, mm_processor_kwargs={"detail": "low"})).text
        beside = [{"role": "user", "content": [{"type": "image", "image": image, "max_dynamic_patch": 1}]}]
        low = {"data": image, "detail": "low"}
        for prompt in (beside, ("what?", low), ("what?", [low])):
            assert (await engine.generate(prompt, GREEDY)).image_token_len == 4
        engine.check_idle()


async def test_auto_is_the_choice_of_the_family() -> None:
    """LLaVA-OneVision does not cut several images; only what a request says itself changes that."""
    async with AsyncEngine(str(folder_of("onevision")), config()) as engine:

        async def tokens(detail: str | None, whole: Any = None) -> int:
            said = {} if detail is None else {"detail": detail}
            parts = [{"type": "image", "image": {"data": picture(seed, 90, 60), **said}} for seed in (1, 2)]
            prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
            answer = await engine.generate(prompt, GREEDY, mm_processor_kwargs=whole)
            return answer.image_token_len

        usual = await tokens(None)
        assert usual == await tokens("low") == await tokens("auto") == await tokens(None, {"detail": "auto"})
        assert usual < await tokens("high") == await tokens(None, {"detail": "high"})
        engine.check_idle()


async def test_of_two_texts_the_second_may_name_an_image(engine: AsyncEngine, tmp_path: Path) -> None:
    picture(1).save(tmp_path / "cat 1.PNG")
    for name in (str(tmp_path / "cat 1.PNG"), f"file://{tmp_path}/cat%201.PNG"):
        answer = await engine.batch_infer(("what?", name), GREEDY)
        assert isinstance(answer, Response)
        assert answer.num_images == 1
    assert len(await engine.batch_infer(("what?", "a cat"), GREEDY)) == 2  # type: ignore[arg-type]


async def test_images_may_come_before_their_text(engine: AsyncEngine, tmp_path: Path) -> None:
    path = tmp_path / "cat 1.PNG"
    picture(1).save(path)
    for image in (picture(1), [picture(1), picture(1)], str(path), path, path.read_bytes(), {"url": str(path)}):
        given: Any = ("what?", image)
        before = await engine.batch_infer(given[::-1], GREEDY)
        assert isinstance(before, Response)
        assert before.num_images == (2 if isinstance(image, list) else 1)
        (listed,) = await engine.batch_infer([given[::-1]], GREEDY)
        said = await engine.generate(given, GREEDY)
        assert before.token_ids == listed.token_ids == said.token_ids
    message = [{"role": "user", "content": "what?"}]
    batches: list[Any] = [(message, "what?"), ([97], "what?"), ("http://a.example is what?", "what?"), ([], "what?")]
    assert not any(map(is_single, batches))


async def test_a_session_is_not_cut_within_an_image(engine: AsyncEngine) -> None:
    keep: dict[str, Any] = {"session_id": 7, "sequence_end": False}
    await engine.generate(("what?", picture(1)), GREEDY, **keep)
    image_id = 4
    first = (await engine.encode(("what?", picture(1)))).index(image_id)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="within an image"):
        await engine.generate("and?", GREEDY, **keep, sequence_start=False, step=first + 3)
    after = await engine.generate("and?", GREEDY, **keep, sequence_start=False, step=first + 16)
    assert after.finish_reason == "length"
    await engine.end_session(7)


async def test_every_spelling_of_an_image(engine: AsyncEngine, tmp_path: Any) -> None:
    image = picture(4)
    buffer = BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    (tmp_path / "image.png").write_bytes(buffer.getvalue())
    text = {"type": "text", "text": "what?"}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image_url", "image_url": str(tmp_path / "image.png")},
        {"type": "image_data", "image_data": {"data": image}},
        {"type": "image", "image": buffer.getvalue()},
        {"type": "image", "path": str(tmp_path / "image.png")},
        {"type": "image", "base64": base64.b64encode(buffer.getvalue()).decode()},
    ]
    answers = [await engine.generate([{"role": "user", "content": [part, text]}], GREEDY) for part in parts]
    answers += [await engine.generate(prompt, GREEDY) for prompt in (("what?", image), ("what?", [url]))]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert answers[-1].cached_token_len > 16


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        (("what?", b"nonsense"), InvalidMessage, "no format"),
        ((f"{IMAGE_TOKEN} {IMAGE_TOKEN}", picture(1)), InvalidMessage, "2 times and 1 images"),
        (("what?", [picture(1)] * 40), InvalidMessage, "session length|KV cache"),
        (("what?", [picture(1)] * 300), InvalidMessage, "300 images"),
        (("what?", picture(1), picture(2)), InvalidMessage, "tuple of two"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], InvalidMessage, "names no image"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}], UnsupportedFeature, "only images"),
        ([{"role": "user", "content": [{"type": "video", "video": [picture(1)]}]}], UnsupportedFeature, "only images"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}],
            UnsupportedFeature,
            "'input_audio', and no model is given audio",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "input_image"}]}],
            InvalidMessage,
            r"content\[1\] is not a part that is understood",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "size": 1}}]}],
            InvalidParameter,
            "unknown option 'size'",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x", "size": 1}]}],
            InvalidParameter,
            "unknown option 'size'",
        ),
        (("what?", {"path": "x.png"}), InvalidMessage, "names no image"),
        (
            [{"role": "user", "content": [{"type": "image", "image": {"data": picture(1), "max_pixels": 9}}]}],
            InvalidParameter,
            "no such choice",
        ),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": picture(1)}]}],
            InvalidMessage,
            "assistant's and has an image",
        ),
    ],
)
async def test_wrong_prompts_harm_no_neighbour(engine: AsyncEngine, prompt: Any, error: type, says: str) -> None:
    if "session length" in says:
        error = ValueError
    async with TaskGroup() as group:
        neighbour = group.create_task(engine.generate(("fine", picture(5)), GREEDY).response())
        with pytest.raises(error, match=says):
            await engine.generate(prompt, GREEDY)
    assert neighbour.result().finish_reason == "length"


async def test_a_spelled_placeholder_is_text(engine: AsyncEngine) -> None:
    ids = await engine.encode("an <image> of words")
    assert 4 not in ids
    with pytest.raises(InvalidMessage, match="1 places for images and 0 images"):
        await engine.generate("an <image>", GREEDY, do_preprocess=False)
    raw = await engine.generate((f"raw {IMAGE_TOKEN}text", picture(1)), GREEDY, do_preprocess=False)
    assert raw.input_token_len > 16


async def test_new_weights_forget_features(encoded: list[int]) -> None:
    async with AsyncEngine(str(folder_of(KIND)), config(enable_prefix_caching=False)) as engine:
        await engine.generate(("one", picture(1)), GREEDY)
        await engine.generate(("two", picture(1)), GREEDY)
        assert sum(encoded) == 1, "features are kept"
        await engine.sleep()
        await engine.wake()
        first = await engine.generate(("two", picture(1)), GREEDY)
        assert sum(encoded) == 2
        tensors = load_file(folder_of(KIND) / "model.safetensors")
        await engine.update_weights({name: each * (1 + ("vision" in name)) for name, each in tensors.items()})
        second = await engine.generate(("two", picture(1)), GREEDY)
        assert sum(encoded) == 3
        assert first.logprobs != second.logprobs


async def test_a_text_model_refuses_images(tiny_checkpoint: Any) -> None:
    async with AsyncEngine(str(tiny_checkpoint), EngineConfig(num_gpu_blocks=32)) as engine:
        for prompt in (("what?", picture(1)), message("what?", picture(1))):
            with pytest.raises(UnsupportedFeature, match="only text"):
                await engine.generate(prompt)


@pytest.mark.parametrize(("budget", "blocks", "caching"), [(17, 90, True), (40, 44, False), (16, 60, False)])
async def test_no_chunk_cuts_tokens_that_see_each_other(budget: int, blocks: int, caching: bool) -> None:
    """Prompts in a pool with little room beside the window and an image, some of which the prefix cache has up to
    within an image."""
    prompts = [(f"{'long words ' * n}and then?", [picture(n), picture(n + 1, 90, 31)]) for n in (0, 1, 2, 3, 1)]
    long = greedy(20)
    tight = config(max_prefill_token_num=budget, num_gpu_blocks=blocks, enable_prefix_caching=caching)
    async with AsyncEngine(str(folder_of("gemma3")), tight) as engine:
        for _ in range(2):
            responses = await engine.batch_infer(prompts, long)  # type: ignore[arg-type]
            assert isinstance(responses, list)
            for prompt, response in zip(prompts, responses, strict=True):
                ids = await engine.encode(prompt)  # type: ignore[arg-type]
                assert worst_difference("gemma3", ids, prompt[1], response) < 1e-4  # type: ignore[arg-type]
        engine.check_idle()


async def test_a_cut_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptImage, "joint_around", lambda self, position: None)
    async with AsyncEngine(str(folder_of("gemma3")), config(max_prefill_token_num=16)) as engine:
        response = await engine.generate(("what?", picture(1)), GREEDY)
        ids = await engine.encode(("what?", picture(1)))
    with pytest.raises(AssertionError):
        assert worst_difference("gemma3", ids, [picture(1)], response) < 1e-4  # type: ignore[arg-type]


async def test_a_step_has_room_for_what_is_computed_in_one() -> None:
    with pytest.raises(InvalidParameter, match="Give it 16 or more"):
        async with AsyncEngine(str(folder_of("gemma3")), config(max_prefill_token_num=15)):
            pass
