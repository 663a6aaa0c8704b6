"""GOT-OCR 2.0, as transformers has it."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.deepseek_vl_hybrid import sam_of
from asyncllm.models.vision.parts import Composed, part_of, text_of
from asyncllm.vl.towers.got_ocr2 import GotOcr2Config

__all__ = ["read_got_ocr2"]


def read_got_ocr2(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, "qwen2", tied=True)
    part = part_of(hf, "vision_config", {"model_type": "got_ocr2_vision", "mlp_dim": 3072})
    part.expect("model_type", "got_ocr2_vision", "")  # the published checkpoint's is empty
    encoder = sam_of(part)
    if encoder.side % 4:
        part.invalid("image_size", f"whose {encoder.side} patches along a side are not a multiple of 4")
    return Composed(text, decoder, GotOcr2Config(encoder=encoder))
