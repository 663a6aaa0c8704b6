"""vocab.json and merges.txt, the only tokenizer files of OPT and of checkpoints saved without a tokenizer.json.
The pattern of a word is in the code of the tokenizer's class."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.text.checkpoint_files import TokenSettings, read_json_object
from asyncllm.text.tokenizers.byte_pairs import added_token
from asyncllm.text.tokenizers.tiktoken_pipeline import words_of

__all__ = ["merges_pipeline"]

_VOCABULARY = "vocab.json"
_MERGES = "merges.txt"

_OF_GPT2 = ("GPT2Tokenizer", "CodeGenTokenizer")
_OF_QWEN2 = ("Qwen2Tokenizer",)


def merges_pipeline(folder: Path, settings: TokenSettings) -> HubTokenizer:
    """Return the pipeline of the two files, with the checkpoint's added tokens. Raises InvalidCheckpoint."""
    path = folder / _VOCABULARY
    name = str(settings.tokenizer.get("tokenizer_class") or _OF_GPT2[0]).removesuffix("Fast")
    if name not in (*_OF_GPT2, *_OF_QWEN2):
        raise InvalidCheckpoint(
            f"{path}: the words of a {short(name)} are not known, and there is no tokenizer.json, which holds them. "
            f"Save one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    vocabulary = read_json_object(path)
    if sorted(map(str, vocabulary.values())) != sorted(map(str, range(len(vocabulary)))):
        raise InvalidCheckpoint(f"{path} does not number its tokens from 0 on. The file is damaged; download it again.")
    try:
        tokenizer = HubTokenizer(models.BPE(vocab=vocabulary, merges=_merges(folder / _MERGES)))
    except Exception as error:  # The library raises bare Exception for merges of unknown tokens.
        if type(error) is not Exception:
            raise
        raise InvalidCheckpoint(f"{folder / _MERGES} does not fit vocab.json: {error}. Download both again.") from None
    spaced = settings.tokenizer.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    if name in _OF_QWEN2:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(words_of(r"\p{N}")), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    later = sorted((id_, token) for id_, token in settings.added.items() if id_ >= len(vocabulary))
    tokenizer.add_tokens([added_token(token) for _, token in later])
    for id_, token in later:
        if tokenizer.token_to_id(token.content) != id_:
            raise InvalidCheckpoint(
                f"{path}: tokenizer_config.json gives {short(token.content)} the id {id_}, which does not follow the "
                f"{len(vocabulary)} tokens of the vocabulary. The files are of different models; download them again."
            )
    return tokenizer


def _merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"Cannot read {path} ({error}). Download it again.") from None
    found = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in found):
        raise InvalidCheckpoint(f"{path} has lines that are not two tokens. The file is damaged; download it again.")
    return [(left, right) for left, right in found]
