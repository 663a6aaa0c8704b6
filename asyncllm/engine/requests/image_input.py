"""ImageInput: loads the images of a prompt, and inserts their tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from asyncllm.config import RequestOptions
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature, short
from asyncllm.prompt_image import CuttingProcessor, ImagePreparation, PromptImage, VideoProcessor
from asyncllm.text.image_marks import (
    OPTIONS,
    VIDEO_OPTIONS,
    ImageSource,
    holds_images,
    split_marks,
    take_images,
    with_numbers,
)

__all__ = ["ImageInput"]

IMAGE_SIZE = 2**16
"""Characters of text that take as long to encode as an image takes to decode and resize."""

FILE_FRAMES = 64
"""Number of images that take as long as a video file."""

_Options = Mapping[str, int | float | str]


class _Offload(Protocol):
    def __call__(
        self, call: Callable[[], PromptImage], size: int, owner: Hashable = None
    ) -> Awaitable[PromptImage]: ...


class ImageInput:
    """Loads images in threads and places their tokens. Holds no state of a request."""

    def __init__(self, preparation: ImagePreparation | None, offload: _Offload) -> None:
        """`preparation`: the image preparation of the model's family; None for a text-only model."""
        self._preparation = preparation
        self._processor = None if preparation is None else preparation.processor
        self._offload = offload

    async def take(
        self, prompt: Any, options: RequestOptions, owner: Hashable = None, before: int = 0
    ) -> tuple[Any, list[PromptImage]]:
        """Return a prompt with marks in place of its images, and the prepared images in order.

        `mm_processor_kwargs` in the options applies to all images; an image part's own options take precedence, but
        `detail: auto` says nothing.
        `before`: images of the conversation so far. Each image is loaded in a thread, at its owner's turn. Raises
        InvalidRequest, EngineError.
        """
        usual = _without_auto(self._checked(options.mm_processor_kwargs))
        if not holds_images(prompt):
            return prompt, []
        if self._processor is None:
            if isinstance(prompt, tuple):
                raise UnsupportedFeature(
                    "The prompt has images, but this model takes only text. Load a vision-language model.", "messages"
                )
            return prompt, []  # The check of messages refuses it and names the place.
        marked, sources = take_images(prompt)
        cutting = self._processor
        if (
            isinstance(cutting, CuttingProcessor)
            and before + sum(not source.is_video for source in sources) > cutting.max_cut_images
        ):
            usual = {"detail": "low", **usual}
        images = [await self._prepared(source, usual, owner, options.cache_salt) for source in sources]
        return marked, [
            msgspec.structs.replace(image, text=with_numbers(image.text, before + index))
            for index, image in enumerate(images)
        ]

    async def _prepared(
        self, source: ImageSource, usual: _Options, owner: Hashable, cache_salt: str | None
    ) -> PromptImage:
        preparation = self._preparation
        assert preparation is not None  # `take` has checked this.
        known = VIDEO_OPTIONS if source.is_video else OPTIONS
        options = {
            **{name: value for name, value in usual.items() if name in known},
            **_without_auto(source.options),
        }
        prepare = partial(preparation.prepare, source.image, options, cache_salt)
        if not source.is_video:
            return await self._offload(prepare, IMAGE_SIZE, owner)
        if not isinstance(preparation.processor, VideoProcessor):
            raise UnsupportedFeature(
                "The prompt has a video, and this model takes only images. Send some of its frames as images.",
                "messages",
            )
        count = len(source.image) if isinstance(source.image, list | tuple) else FILE_FRAMES
        return await self._offload(partial(prepare, is_video=True), IMAGE_SIZE * count, owner)

    def _checked(self, options: _Options | None) -> _Options:
        """Return a request's image options. Raises InvalidParameter."""
        if not options:
            return {}
        if self._processor is None:
            raise InvalidParameter(
                "mm_processor_kwargs says how images are prepared, and this model takes only text. Leave it out.",
                "mm_processor_kwargs",
            )
        unknown = sorted(map(str, options.keys() - OPTIONS - VIDEO_OPTIONS))
        if unknown:
            raise InvalidParameter(
                f"mm_processor_kwargs has the unknown entry {short(unknown[0])}. Its entries are: "
                f"{', '.join(sorted(OPTIONS | VIDEO_OPTIONS))}.",
                "mm_processor_kwargs",
            )
        return options

    def written(self, text: str, images: Sequence[PromptImage]) -> str:
        """Return a text with the family's placeholders in place of the marks. Placeholders that the template itself
        writes stay if they differ only in white space."""
        if self._processor is None:
            return text
        usual, ((_, first), *others) = self._processor.placeholder, split_marks(text)
        texts = [image.text or usual for image in images] + [usual] * (len(others) - len(images))
        pairs = zip(texts, others, strict=False)
        kept = [(own if own.strip() == text.strip() else text) + after for text, (own, after) in pairs]
        return "".join([first, *kept])

    def placed(
        self, known: Sequence[int], ids: Sequence[int], images: Sequence[PromptImage]
    ) -> tuple[list[int], list[PromptImage]]:
        """Return `known` and the following ids with the images' tokens inserted, and the images in the latter.

        Raises InvalidMessage unless the ids have one place per image.
        """
        processor, token_ids = self._processor, list(known)
        if processor is None:
            token_ids.extend(ids)
            return token_ids, []
        kinds = {processor.token_id}
        if isinstance(processor, VideoProcessor):
            kinds.add(processor.video_token_id)
        places = [index for index, token in enumerate(ids) if token in kinds]
        wanted = sum(len(image.placeholder_rows) or 1 for image in images)
        if len(places) != wanted:
            raise InvalidMessage(
                f"The prompt has {len(places)} places for images and {len(images)} images, which take {wanted}. Give "
                f"each image its own, or leave the places to the chat template."
            )
        start, placed, place = 0, [], iter(places)
        for image in images:
            spans: list[tuple[int, int]] = []
            for length in image.placeholder_rows or (image.length,):
                end = next(place)
                token_ids += [*ids[start:end], *processor.before]
                spans.append((len(token_ids), len(token_ids) + length))
                token_ids += [*[ids[end]] * length, *processor.after]
                start = end + 1
            first = spans[0][0]
            within = tuple((begin - first, stop - first) for begin, stop in spans)
            placed.append(msgspec.structs.replace(image, position=first, length=within[-1][1], spans=within))
        token_ids.extend(ids[start:])
        return token_ids, placed


def _without_auto(options: _Options) -> _Options:
    return {name: value for name, value in options.items() if (name, value) != ("detail", "auto")}
