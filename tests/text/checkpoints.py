"""Tokenizer folders in the layout of the hub, trained here on a few sentences."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and 17 + 25 is 42.",
    "def add(a, b):\n    return a + b  # two  spaces\n\tand a tab",
    "Where is the little house? The house stands beside the river.",
    "L'été à Zürich, naïve façade; 你好 世界。 今日は 😀👍🏽 привет мир",
] * 12


def write_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")


def byte_level(folder: Path) -> Path:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen; three special tokens, and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("<\uff5cwide\uff5c>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
    )
    return folder


def byte_fallback(folder: Path) -> Path:
    """Llama-style BPE: U+2581 for the space, byte fallback, a stripped dummy prefix."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < 3]
    write_json(folder / "tokenizer.json", **description)
    write_json(
        folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", bos_token="<s>", eos_token="</s>"
    )
    return folder


def metaspace(folder: Path) -> Path:
    """Unigram with Metaspace on both sides, as T5 and XLM-R have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return folder


def word_piece(folder: Path) -> Path:
    """WordPiece with clean-up, whose decoder looks at the neighbours of a token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", unk_token="[UNK]", eos_token="[SEP]")
    return folder


def sentencepiece_model(kind: str, **options: Any) -> bytes:
    """A tokenizer.model: `kind` is "bpe" or "unigram"; options as for sentencepiece's trainer."""
    model = io.BytesIO()
    settings = {"vocab_size": 400 if kind == "bpe" else 340, "byte_fallback": True, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type=kind,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
        character_coverage=0.98,
        **settings,
    )
    return model.getvalue()


def sentencepiece_bpe(folder: Path) -> Path:
    """Llama 2's and InternLM2's layout: tokenizer.model, a chat token added behind the vocabulary."""
    (folder / "tokenizer.model").write_bytes(
        sentencepiece_model("bpe", remove_extra_whitespaces=False, split_digits=True)
    )
    added = {
        str(id_): {"content": content, "special": True, "lstrip": False, "rstrip": False}
        for id_, content in {0: "<unk>", 1: "<s>", 2: "</s>", 400: "<|im_start|>", 401: "<|im_end|>"}.items()
    }
    write_json(
        folder / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        added_tokens_decoder=added,
    )
    return folder


def sentencepiece_unigram(folder: Path) -> Path:
    """sentencepiece's own defaults: unigram, white space cleaned up."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("unigram"))
    return folder


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "sentencepiece_bpe": sentencepiece_bpe,
    "sentencepiece_unigram": sentencepiece_unigram,
}
