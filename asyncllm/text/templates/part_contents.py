"""Contents as lists of parts, for chat templates that accept no other form, such as Idefics3's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidMessage
from asyncllm.text.image_marks import KINDS, OWN_END, parts_of
from asyncllm.text.templates.jinja_template import JinjaTemplate

__all__ = ["PartContents", "with_own_places", "written_for_media"]

_AROUND = ("0", "1")
"""Texts before and after an image, used to find out what is written for it."""


class PartContents:
    """A template whose rendered texts have marks for images, like those of other templates.

    The template's own text for an image follows the mark, up to `OWN_END`. Some families write the same text for every
    image, and the family's placeholder replaces it.
    """

    def __init__(self, template: JinjaTemplate, *, everywhere: bool = True) -> None:
        """`everywhere`: whether contents without media are lists too."""
        self._template = template
        self._everywhere = everywhere
        self._written = written_for_media(template)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the text. Contents of messages are texts with marks. Raises InvalidMessage."""
        known = {mark: KINDS[mark] for mark in self._written}
        parted: list[dict[str, Any]] = [
            {**each, "content": parts_of(each["content"] or "", known)}
            if self._everywhere or any(mark in (each["content"] or "") for mark in known)
            else dict(each)
            for each in messages
        ]
        text = self._template.render(parted, add_generation_prompt=add_generation_prompt, variables=variables)
        for mark, written in self._written.items():
            count = sum(part == {"type": KINDS[mark]} for each in parted for part in each["content"] or ())
            # If it occurs more often, a user has written it too, and the tokens decide.
            if count and text.count(written) == count:
                text = text.replace(written, f"{mark}{written}{OWN_END}")
        return text


def written_for_media(template: JinjaTemplate, variables: Mapping[str, Any] | None = None) -> Mapping[str, str]:
    """Return by mark what a template writes for an image or a video among the parts of a message, if anything."""
    written = {mark: _written_for(template, kind, variables or {}) for mark, kind in KINDS.items()}
    return {mark: text for mark, text in written.items() if text}


def with_own_places(text: str, written: Mapping[str, str]) -> str:
    """Return a rendered text with `written_for_media` after each mark, up to `OWN_END`."""
    for mark, own in written.items():
        text = text.replace(mark, f"{mark}{own}{OWN_END}")
    return text


def _written_for(template: JinjaTemplate, kind: str, variables: Mapping[str, Any]) -> str:
    """Return what the template writes for an image between two texts; empty if it omits images."""
    before, after = ({"type": "text", "text": text} for text in _AROUND)
    try:
        without, text = (
            template.render(
                [{"role": "user", "content": [before, *image, after]}],
                add_generation_prompt=False,
                variables=variables,
            )
            for image in ([], [{"type": kind}])
        )
    except InvalidMessage:
        return ""
    if repr("type") in without:
        return ""  # It writes the list itself down: it knows no parts.
    start = _shared(without, text)
    end = _shared(without[start:][::-1], text[start:][::-1])
    return text[start : len(text) - end]


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (own, others) in pairs if own != others), min(len(one), len(other)))
