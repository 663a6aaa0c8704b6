"""The model card of ``tiny-vlm``."""

from __future__ import annotations

from pathlib import Path

from train_tiny_chat.card import Accuracies

from .network import VisionNetwork
from .skills import GOALS

_CARD = """---
license: apache-2.0
language: en
library_name: asyncllm
pipeline_tag: image-text-to-text
---

# tiny-vlm

A vision-language model of {millions:.1f} million parameters that ships with asyncllm, for tests, demos and examples.
It looks at pictures of up to eight coloured shapes, counts them, names colours and shapes, describes a
picture, and compares two. It knows six colours and four shapes, and nothing of photographs. Without an
image it answers the easier questions of tiny-chat.

## Architecture

LLaVA: a CLIP tower (hidden size {tower}, {tower_layers} layers, {tower_heads} heads, pictures of {side} x {side}
pixels, {tokens} tokens an image), a projector of two layers, and a Llama decoder (hidden size {hidden}, {layers}
layers, {heads} heads, {kv} key-value heads, vocabulary {vocab}), bfloat16 weights. Prompts are those of tiny-chat; an
image stands in them as `<image>` and a line feed.

## Data and training

Pictures are drawn by PIL and questions written by `examples/train_tiny_vlm` in the asyncllm repository, text by
`examples/train_tiny_chat`; the decoder begins as every other layer of tiny-chat. Nothing is downloaded and no
other model is involved. Training saw {images} thousand pictures in {minutes:.1f} minutes on {device}:

```
python examples/train_tiny_vlm/train.py --out asyncllm/assets/tiny-vlm --minutes {wanted:g}
```

## Accuracy

Share of exactly right greedy answers on held-out questions, measured by the program that trains it;
`bench/quality.py --vision` measures the same through asyncllm. No set of shapes that is asked about, in
whatever arrangement, was seen in training.

| skill | questions | accuracy | goal |
|---|---:|---:|---:|
{rows}

## Licence

Apache-2.0, like asyncllm.
"""


def write_card(
    network: VisionNetwork,
    folder: Path,
    accuracies: Accuracies,
    images: int,
    minutes: float,
    wanted: float,
    device: str,
) -> None:
    """Writes the model card with the measured accuracies."""
    tower, text = network.tower_shape, network.language_model.shape
    rows = "\n".join(
        f"| {skill} | {count} | {100 * value:.1f} % | {f'{100 * GOALS[skill]:.0f} %' if skill in GOALS else ''} |"
        for skill, (count, value) in accuracies.items()
    )
    card = _CARD.format(
        millions=sum(parameter.numel() for parameter in network.parameters()) / 1e6,
        tower=tower.hidden,
        tower_layers=tower.layers,
        tower_heads=tower.heads,
        side=tower.image,
        tokens=tower.tokens,
        hidden=text.hidden,
        layers=text.layers,
        heads=text.heads,
        kv=text.key_value_heads,
        vocab=text.vocabulary,
        images=round(images / 1e3),
        minutes=minutes,
        wanted=wanted,
        device=device,
        rows=rows,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
