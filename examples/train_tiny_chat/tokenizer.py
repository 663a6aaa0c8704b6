"""The byte-level BPE tokenizer of ``tiny-chat`` and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .conversation import document

VOCABULARY_SIZE = 2048
PAD, BOS, END_OF_TEXT, TURN_START, TURN_END = (
    "<|pad|>",
    "<|bos|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)
_NAMED = (PAD, BOS, END_OF_TEXT, TURN_START, TURN_END, "<|image|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
"""What stands around a call. They are tokens of their own, and not special ones: a decoded reply shows them."""
_RESERVED_COUNT = 26

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You can call these tools:
{% for tool in tools %}{{ tool.function.name }}(
{%- for name, schema in ((tool.function.parameters or {}).properties or {}).items() -%}
{%- set more = schema.keys() | reject('in', ['type', 'title', 'description']) | list if schema is mapping else [1] -%}
{{ name }}: {{ schema | tojson if more or schema.type is not string else schema.type }}{{ ', ' if not loop.last }}
{%- endfor -%}
){{ ': ' + tool.function.description if tool.function.description }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in (messages[1:] if tools and messages[0].role == 'system' else messages) -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}"""


def _special_tokens() -> list[str]:
    return [*_NAMED, *(f"<|reserved_{index}|>" for index in range(_RESERVED_COUNT))]


def _with_call_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer whose last reserved tokens are `CALL_MARKS`."""
    content = json.loads(tokenizer.to_str())
    reserved = [f"<|reserved_{_RESERVED_COUNT - 2 + index}|>" for index in range(2)]
    for old, new in zip(reserved, CALL_MARKS, strict=True):
        for token in content["added_tokens"]:
            if token["content"] == old:
                token |= {"content": new, "special": False}
                content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def _corpus(seed: int, documents: int) -> Iterator[str]:
    random = Random(f"tokenizer/{seed}")
    for _ in range(documents):
        text = "".join(segment.text for segment in document(random, 600))
        for special in _NAMED:
            text = text.replace(special, "\n")
        yield text


def build_tokenizer(seed: int, documents: int = 30_000) -> Tokenizer:
    """Trains the tokenizer on generated text; every digit and every byte is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _special_tokens()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_corpus(seed, documents), trainer)
    missing = VOCABULARY_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|filler_{index}|>", special=True, normalized=False) for index in range(missing)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return _with_call_marks(tokenizer)
