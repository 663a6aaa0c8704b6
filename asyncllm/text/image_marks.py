"""Takes images and videos out of messages, and leaves a mark in the text in place of each.

Chat templates and tokenizers see the marks. Later these become the placeholder that the model's family writes for an
image.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from asyncllm.errors import InvalidMessage, InvalidParameter, short

__all__ = [
    "IMAGE_MARK",
    "IMAGE_PARTS",
    "IMAGE_TOKEN",
    "INDEX_MARK",
    "KINDS",
    "MAX_FRAMES",
    "MAX_IMAGES",
    "NUMBER_MARK",
    "OPTIONS",
    "OWN_END",
    "PART_KEYS",
    "VIDEO_MARK",
    "VIDEO_OPTIONS",
    "VIDEO_PARTS",
    "ImageSource",
    "holds_images",
    "is_address",
    "is_data_url",
    "names_image",
    "parts_of",
    "source_of",
    "split_marks",
    "take_images",
    "text_first",
    "with_numbers",
]

IMAGE_TOKEN = "<IMAGE_TOKEN>"
"""Users put this into a text where an image of the same message belongs."""

IMAGE_MARK = f"{secrets.randbits(128):039d}"
"""The mark of an image in a text. It is drawn per process, so that no user can write it, and consists of digits, which
templates leave unchanged."""

INDEX_MARK = f"{secrets.randbits(128):039d}"
"""In a family's placeholder for an image, stands for the image's number in its prompt, from 0."""
NUMBER_MARK = f"{secrets.randbits(128):039d}"
"""The same, counted from 1."""

VIDEO_MARK = f"{secrets.randbits(128):039d}"
"""The mark of a video in a text."""
OWN_END = f"{secrets.randbits(128):039d}"
"""The end of the template's own text for the image or video whose mark precedes it."""

KINDS: Mapping[str, str] = {IMAGE_MARK: "image", VIDEO_MARK: "video"}
"""Mark -> type of the part that it represents."""

MAX_IMAGES = 256
"""Maximum number of images in a prompt."""
MAX_FRAMES = 768
"""Maximum number of frames in a video."""

IMAGE_PARTS = ("image_url", "image_data", "image")
VIDEO_PARTS = ("video_url", "video")
OPTIONS = frozenset({"detail", "max_dynamic_patch", "min_pixels", "max_pixels"})
VIDEO_OPTIONS = frozenset({"fps", "num_frames", "min_pixels", "max_pixels"})
"""Keys of a part that describe its image, besides its source."""
IGNORED_KEYS = frozenset({"cache_control", "modalities", "uuid"})
"""Keys of a part that have no effect here: Anthropic's, SGLang's and vLLM's."""
_SOURCES = ("url", "data", "frames")
_SOURCE_KEYS = ("path", "base64")
"""Keys of a source that is not a URL, besides the type."""
PART_KEYS = frozenset(
    {"type", *IMAGE_PARTS, *VIDEO_PARTS, *_SOURCES, *_SOURCE_KEYS, *OPTIONS, *VIDEO_OPTIONS, *IGNORED_KEYS}
)
"""All keys of a part that is an image or a video."""

_MARKS = frozenset(KINDS)
_FILE_NAME = re.compile(r"\.(bmp|gif|jpe?g|png|tiff?|webp)$", re.IGNORECASE)
_ANY_MARK = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


class ImageSource(NamedTuple):
    """An image or a video as given in a prompt."""

    image: Any
    """A path, a URL, bytes, or a PIL image; for a video a file, or a list of these."""
    options: Mapping[str, Any]
    is_video: bool = False


def is_data_url(source: object) -> TypeGuard[str]:
    """Return whether this is a `data:` URL, in any case."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def is_address(source: object) -> TypeGuard[str]:
    """Return whether this is an http(s) URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def names_image(text: str) -> bool:
    """Return whether a text is the URL of an image, or ends like an image file name."""
    return is_data_url(text) or is_address(text) or text[:7].lower() == "file://" or bool(_FILE_NAME.search(text))


def source_of(part: Mapping[str, Any], kind: str) -> Any:
    """Return the image or the video that a part of this type names, or None."""
    value = part.get(kind)
    if isinstance(value, dict):
        return next((value[name] for name in _SOURCES if name in value), None)
    if value is not None:
        return value
    # Next to the type, as in messages for transformers.
    encoded = part.get("base64")
    return f"data:;base64,{encoded}" if isinstance(encoded, str) else part.get("url", part.get("path"))


def holds_images(prompt: Any) -> bool:
    """Return whether a prompt is (text, images) in either order, or messages with an image or a video among their
    parts."""
    prompt = text_first(prompt)
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], str):
        return True
    if not isinstance(prompt, list | tuple):
        return False
    return any(
        isinstance(part, dict) and part.get("type") in (*IMAGE_PARTS, *VIDEO_PARTS)
        for message in prompt
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def text_first(prompt: Any) -> Any:
    """Return (images, text) as (text, images), and any other prompt unchanged."""
    if not isinstance(prompt, tuple) or len(prompt) != 2 or not isinstance(prompt[1], str) or names_image(prompt[1]):
        return prompt
    images = prompt[0] if isinstance(prompt[0], list | tuple) else [prompt[0]]
    return prompt[::-1] if images and all(map(_is_image, images)) else prompt


def _is_image(value: Any) -> bool:
    if isinstance(value, str):
        return names_image(value) and not (is_address(value) and " " in value)
    return "role" not in value if isinstance(value, dict) else not isinstance(value, int | list | tuple | None)


def take_images(prompt: Any) -> tuple[Any, list[ImageSource]]:
    """Return a prompt of `holds_images` with marks in place of its images, and the images in order. (text, images)
    in either order becomes a text, and messages stay messages.

    Raises InvalidMessage for malformed parts, and if the number of IMAGE_TOKENs differs from the message's images.
    """
    sources: list[ImageSource] = []
    prompt = text_first(prompt)
    if isinstance(prompt, tuple) and isinstance(prompt[0], str):
        if len(prompt) != 2:
            raise InvalidMessage("A prompt with images is a tuple of two: (text, image) or (text, [image, ...]).")
        text, images = prompt
        for image in images if isinstance(images, list | tuple) else [images]:
            part = {"image": image}
            sources.append(_source(part, "image", "The prompt") if isinstance(image, dict) else ImageSource(image, {}))
        marked: Any = _placed([*[IMAGE_MARK] * len(sources), text], "The prompt")
    else:
        marked = [_without_images(message, f"messages[{index}]", sources) for index, message in enumerate(prompt)]
    if len(sources) > MAX_IMAGES:
        raise InvalidMessage(f"The prompt has {len(sources)} images, more than {MAX_IMAGES}. Send fewer.")
    return marked, sources


def with_numbers(text: str, index: int) -> str:
    """Return a family's placeholder with the image's number in its prompt, from 0, filled in."""
    return text.replace(INDEX_MARK, str(index)).replace(NUMBER_MARK, str(index + 1))


def split_marks(text: str) -> list[tuple[str, str]]:
    """Return the texts before and after the marks of images and videos, each with the template's own text for the
    preceding image."""
    pieces = (piece.rpartition(OWN_END) for piece in _ANY_MARK.split(text))
    return [(own, after) for own, _, after in pieces]


def parts_of(text: str, kinds: Mapping[str, str] = KINDS) -> list[dict[str, str]]:
    """Return a marked text as parts; only marks of `kinds` become media parts."""
    pieces = re.split(f"({_ANY_MARK.pattern})", text)
    return [{"type": kinds[each]} if each in kinds else {"type": "text", "text": each} for each in pieces if each]


def _without_images(message: Any, where: str, sources: list[ImageSource]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    pieces: list[Any] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS or kind in VIDEO_PARTS:
            source = _source(part, str(kind), f"{where}.content[{index}]")
            sources.append(source)
            pieces.append(VIDEO_MARK if source.is_video else IMAGE_MARK)
        elif kind == "text" and isinstance(part.get("text"), str):
            pieces += ["\n", part["text"]] if pieces and pieces[-1] not in _MARKS else [part["text"]]
        else:
            return message  # The check of messages refuses it by name.
    if not any(piece in _MARKS for piece in pieces):
        return message
    if message.get("role") == "assistant":
        raise InvalidMessage(f"{where} is the assistant's and has an image. Images belong into messages of the user.")
    return {**message, "content": _placed(pieces, where)}


def _placed(pieces: Sequence[str], where: str) -> str:
    """Return the text, with marks where the user has put IMAGE_TOKENs, if any."""
    count = sum(piece is IMAGE_MARK for piece in pieces)
    text = "".join(piece for piece in pieces if piece is not IMAGE_MARK)
    asked = text.count(IMAGE_TOKEN)
    if not asked:
        return "".join(pieces)
    if VIDEO_MARK in pieces:
        raise InvalidMessage(
            f"{where} has {IMAGE_TOKEN} beside a video. Put the images and videos where they belong as parts instead."
        )
    if asked != count:
        raise InvalidMessage(
            f"{where} has {IMAGE_TOKEN} {asked} times and {count} images. Write it once for each image, or not at all."
        )
    return text.replace(IMAGE_TOKEN, IMAGE_MARK)


def _source(part: Mapping[str, Any], kind: str, where: str) -> ImageSource:
    value, source, is_video = part.get(kind), source_of(part, kind), kind in VIDEO_PARTS
    if source is None:
        raise InvalidMessage(f'{where} names no image. Give {{"type": "image_url", "image_url": {{"url": "..."}}}}.')
    inner = value if isinstance(value, dict) else {}
    # Options are next to the URL or next to the type.
    given = {**part, **inner}
    given = {key: each for key, each in given.items() if each is not None}
    options = {key: given[key] for key in given.keys() - {"type", kind, *_SOURCES, *_SOURCE_KEYS, *IGNORED_KEYS}}
    known = VIDEO_OPTIONS if is_video else OPTIONS
    unknown = sorted(map(str, options.keys() - known))
    if unknown:
        raise InvalidParameter(
            f"{where} has the unknown option {short(unknown[0])}. Its options are: {', '.join(sorted(known))}.",
            "messages",
        )
    if is_video and isinstance(source, list | tuple) and not 1 <= len(source) <= MAX_FRAMES:
        raise InvalidMessage(f"{where} is a video of {len(source)} frames, and it has 1 to {MAX_FRAMES}. Send fewer.")
    return ImageSource(source, options, is_video)
