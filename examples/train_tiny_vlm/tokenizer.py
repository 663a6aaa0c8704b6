"""The tokenizer of ``tiny-vlm``: that of ``tiny-chat``, whose token for images has LLaVA's name."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

IMAGE = "<image>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def image_tokenizer(text_model: Path) -> Tokenizer:
    """Returns the tokenizer of a ``tiny-chat`` folder with the image token renamed."""
    fields = json.loads((text_model / "tokenizer.json").read_text(encoding="utf-8"))
    for token in fields["added_tokens"]:
        if token["content"] == "<|image|>":
            token["content"] = IMAGE
    vocabulary = fields["model"]["vocab"]
    vocabulary[IMAGE] = vocabulary.pop("<|image|>")
    return Tokenizer.from_str(json.dumps(fields))
