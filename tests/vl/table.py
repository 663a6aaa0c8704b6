"""The tables of docs/vision.md, generated from the readers of config.json and the checkpoints of the tests:
`python -m tests.vl.table`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncllm.models.vision.refused import REFUSED_VISION_MODELS
from asyncllm.models.vision_language import VISION_MODELS
from tests.vl.kinds import KINDS
from tests.vl.layouts import classes_of
from tests.vl.published.families import PUBLISHED

__all__ = ["PAGE", "renewed"]

PAGE = Path(__file__).parent.parent.parent / "docs" / "vision.md"

BEGIN, END = "<!-- made by python -m tests.vl.table -->\n", "<!-- end -->\n"


def renewed(page: str) -> str:
    """Return the page with its generated part renewed."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{''.join(_lines())}\n{END}{rest.partition(END)[2]}"


def _lines() -> Iterator[str]:
    checked = _checked()
    yield "| class | models | tested as | oracle |\n| --- | --- | --- | --- |\n"
    for architecture, models in sorted(VISION_MODELS.items()):
        kinds, oracles = zip(*checked[architecture], strict=True)
        own = ", ".join(f"`{kind}`" for kind in kinds)
        yield f"| `{architecture}` | {models} | {own} | {'; '.join(dict.fromkeys(oracles))} |\n"
    yield "\nThese are refused, with the reason and the most similar supported class:\n\n"
    yield "| class | models | reason | most similar |\n| --- | --- | --- | --- |\n"
    for architecture, each in REFUSED_VISION_MODELS.items():
        yield f"| `{architecture}` | {each.models} | {each.why} | {each.nearest} |\n"


def _checked() -> dict[str, list[tuple[str, str]]]:
    """Return architecture -> (kind of test checkpoint, class of the oracle that it is compared with)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    checked: dict[str, list[tuple[str, str]]] = {}
    for kind, make in KINDS.items():
        oracle = CLASSES[make()[0].model_type]
        for architecture in (oracle, *classes_of(kind)):
            checked.setdefault(architecture, []).append((kind, f"`{oracle}`"))
    for kind, family in PUBLISHED.items():
        for architecture in (family.architecture, *family.also):
            checked.setdefault(architecture, []).append((kind, family.oracle))
    return checked


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
