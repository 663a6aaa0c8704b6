"""The byte-level BPE tokenizer of ``tiny-chat`` and its chat template."""

from __future__ import annotations

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
_SPECIAL_COUNT = 32

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _special_tokens() -> list[str]:
    return [*_NAMED, *(f"<|reserved_{index}|>" for index in range(_SPECIAL_COUNT - len(_NAMED)))]


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
    return tokenizer
