"""Contents as lists of parts, for chat templates that read them in no other form, such as Idefics3's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidMessage
from asyncllm.text.image_marks import KINDS, OWN_END, parts_of
from asyncllm.text.jinja_template import JinjaTemplate

__all__ = ["PartContents"]

_AROUND = ("0", "1")
"""Texts before and behind an image, in the question what is written for it."""


class PartContents:
    """A template whose texts have marks where it writes images down, as those of other templates have.

    Behind a mark stands what the template writes itself, up to `OWN_END`: in some families the same for each image,
    which the family's own text takes the place of.
    """

    def __init__(self, template: JinjaTemplate) -> None:
        self._template = template
        self._written = {mark: self._written_for(kind) for mark, kind in KINDS.items()}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the text. The contents of messages are texts with marks. Raises InvalidMessage."""
        known = {mark: KINDS[mark] for mark, written in self._written.items() if written}
        parted = [{**each, "content": parts_of(each["content"] or "", known)} for each in messages]
        text = self._template.render(parted, add_generation_prompt=add_generation_prompt, variables=variables)
        for mark, written in self._written.items():
            count = sum(part == {"type": KINDS[mark]} for each in parted for part in each["content"])
            # Where it stands more often, a user has written it too, and the tokens decide.
            if count and text.count(written) == count:
                text = text.replace(written, f"{mark}{written}{OWN_END}")
        return text

    def _written_for(self, kind: str) -> str:
        """Return what the template writes for an image between two texts; nothing where it leaves images out."""
        before, behind = ({"type": "text", "text": text} for text in _AROUND)
        try:
            without, text = (
                self._template.render(
                    [{"role": "user", "content": [before, *image, behind]}], add_generation_prompt=False, variables={}
                )
                for image in ([], [{"type": kind}])
            )
        except InvalidMessage:
            return ""
        start = _shared(without, text)
        end = _shared(without[start:][::-1], text[start:][::-1])
        return text[start : len(text) - end]


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (own, others) in pairs if own != others), min(len(one), len(other)))
