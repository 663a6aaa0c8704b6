"""Token settings of a checkpoint folder: the JSON files next to the weights, read once and typed.

Sources, as `transformers` writes them: generation_config.json, tokenizer_config.json, special_tokens_map.json,
added_tokens.json and config.json. All are optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.errors import InvalidCheckpoint, short

__all__ = [
    "BY_MODEL_TYPE",
    "MAX_TOKEN_ID",
    "AddedToken",
    "TokenSettings",
    "classes_of",
    "read_json_object",
]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Code Llama's tokens for infilling."""
END_OF_INFILLING = "\u2581<EOT>"
CHATGLM_TURNS = ("<|user|>", "<|observation|>")
"""Tokens with which ChatGLM3 ends its turn, for the user or for a tool."""
MAX_TOKEN_ID = 2**24 - 1
"""Highest token id. Tables have an entry for each id, so a damaged id must not determine their size."""


BY_MODEL_TYPE: Mapping[str, str] = {
    "aquila": "AquilaForCausalLM",
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "internlm": "InternLMForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "mimo": "MiMoForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "ministral": "MinistralForCausalLM",
    "multi_modality": "MultiModalityCausalLM",
    "RefinedWeb": "RWForCausalLM",
    "RefinedWebModel": "RWForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "stablelm_epoch": "StableLMEpochForCausalLM",
    "Yi": "YiForCausalLM",
}
"""`model_type` -> class, for a config.json without `architectures`, such as DeepSeek-VL2's."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in the text before the tokenizer's own model sees it."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The token-related settings of a checkpoint."""

    named: dict[str, str]
    """"eos_token" and the like -> the token's text."""
    added: dict[int, AddedToken]
    """Added tokens by the id in the files."""
    unnumbered: tuple[AddedToken, ...]
    """Added tokens without an id, which are looked up in the vocabulary."""
    add_bos: bool | None
    """`add_bos_token`; None if the checkpoint does not say."""
    add_eos: bool | None
    """`add_eos_token`, for texts that nothing follows."""
    legacy: bool
    """False: no dummy prefix before text that follows a special token (sentencepiece)."""
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    model: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TokenSettings:
        """Read the files of `folder`. Raises InvalidCheckpoint for a file that is unreadable or inconsistent."""
        tokenizer = read_json_object(folder / "tokenizer_config.json")
        special_map = read_json_object(folder / "special_tokens_map.json")
        named: dict[str, str] = {}
        unnumbered: dict[str, AddedToken] = {}
        for name in NAMED_TOKENS:
            for source in (tokenizer, special_map):
                token = _added_token(source.get(name), name)
                if token is not None:
                    named[name] = token.content
                    unnumbered.setdefault(token.content, token)
                    break
        for name, token in _other_named(tokenizer).items():
            named.setdefault(name, token.content)
            unnumbered.setdefault(token.content, token)
        for source in (tokenizer, special_map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                values = source.get(key) or []
                if not isinstance(values, list | dict):
                    raise InvalidCheckpoint(
                        f"{key} is {short(values)} in the tokenizer's settings, but it is a list of tokens, or an "
                        f"object with one per name. Correct tokenizer_config.json or special_tokens_map.json."
                    )
                for value in values.values() if isinstance(values, dict) else values:
                    token = _added_token(value, key)
                    if token is not None:
                        unnumbered.setdefault(token.content, token)
        added = _numbered_tokens(folder, tokenizer)
        for id_, token in added.items():
            # A token in the list of special ones is special, whatever the table of ids says.
            listed = unnumbered.pop(token.content, token)
            added[id_] = msgspec.structs.replace(token, special=token.special or listed.special)
        for id_, content in _added_tokens_file(folder).items():
            if id_ not in added:
                added[id_] = unnumbered.pop(content, AddedToken(content, special=False))
        add_bos, add_eos = (tokenizer.get(key) for key in ("add_bos_token", "add_eos_token"))
        model = read_json_object(folder / "config.json")
        return cls(
            named=named,
            added=added,
            unnumbered=tuple(unnumbered.values()),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            add_eos=add_eos if isinstance(add_eos, bool) else None,
            legacy=tokenizer.get("legacy") is not False,
            generation=read_json_object(folder / "generation_config.json"),
            tokenizer=tokenizer,
            model=model,
        )

    def special_texts(self) -> frozenset[str]:
        """Return the texts of all tokens that the checkpoint calls special."""
        numbered = (token.content for token in self.added.values() if token.special)
        return frozenset((*self.named.values(), *(token.content for token in self.unnumbered), *numbered))

    def eos_token_ids(self, lookup: Callable[[str], int | None]) -> tuple[int, ...]:
        """Return the ids that end an answer: generation_config.json's, then tokenizer_config.json's, then config.json's
        if the first file names none, then those that no file names: the end of an infilled text in Code Llama, the next
        turns in ChatGLM3. Where only one id can be used, it is the first."""
        stated = _ids(self.generation, "eos_token_id", "generation_config.json")
        named = self.named_id("eos_token", lookup)
        found = dict.fromkeys(stated if named is None else (*stated, named))
        if not stated:
            found |= dict.fromkeys(self._model_ids("eos_token_id"))
        turns = CHATGLM_TURNS if self.tokenizer.get("tokenizer_class") == "ChatGLMTokenizer" else ()
        unnamed = (lookup(text) for text in (END_OF_INFILLING, *turns))
        return tuple({**found, **{id_: None for id_ in unnamed if id_ is not None}})

    def named_id(self, name: str, lookup: Callable[[str], int | None]) -> int | None:
        """Return the id of a named token such as "eos_token"; None if there is none."""
        return lookup(self.named[name]) if name in self.named else None

    def bos_token_id(self, lookup: Callable[[str], int | None]) -> int | None:
        """Return the id that begins a sequence, from the same files in the same order as `eos_token_ids`, or None."""
        for id_ in _ids(self.generation, "bos_token_id", "generation_config.json"):
            return id_
        if "tokenizer_class" in self.tokenizer or "bos_token" in self.named:
            return self.named_id("bos_token", lookup)
        return next(self._model_ids("bos_token_id"), None)

    def _model_ids(self, key: str) -> Iterator[int]:
        for part in (self.model, self.model.get("text_config"), self.model.get("llm_config")):
            if isinstance(part, dict) and part.get(key) is not None:
                yield from _ids(part, key, "config.json")
                return


def classes_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the model classes in a config.json, if any."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if names is None and isinstance(model_type, str) and model_type in BY_MODEL_TYPE:
        return [BY_MODEL_TYPE[model_type]]
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty when there is no such file. Raises InvalidCheckpoint if it is
    damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidCheckpoint(f"Cannot read {path} ({error.strerror}). Check the file and its permissions.") from None
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{path} is not a JSON object: {error}. The file is truncated or damaged; download it again."
        ) from None


def _added_token(value: object, where: str) -> AddedToken | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return AddedToken(value)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in ("lstrip", "rstrip", "single_word") if name in value}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)
    raise InvalidCheckpoint(
        f"The tokenizer's settings name {value!r} as {where}, but a token is a text or an object with a text "
        f"'content'. Correct tokenizer_config.json or special_tokens_map.json."
    )


def _other_named(tokenizer: dict[str, Any]) -> dict[str, AddedToken]:
    """Return the tokens that a model has names of its own for, such as `image_token`, or the marks of infilled text."""
    stated = {name: value for name, value in tokenizer.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(tokenizer.get(key), dict):
            stated |= tokenizer[key]
    found: dict[str, AddedToken] = {}
    for name, value in stated.items():
        if name not in NAMED_TOKENS and (isinstance(value, str) or (isinstance(value, dict) and "content" in value)):
            token = _added_token(value, name)
            if token is not None:
                found[name] = token
    return found


def _numbered_tokens(folder: Path, tokenizer: dict[str, Any]) -> dict[int, AddedToken]:
    table = tokenizer.get("added_tokens_decoder") or {}
    numbered: dict[int, AddedToken] = {}
    try:
        for id_, value in table.items():
            token = _added_token({"special": False, **value}, "added token")
            if token is not None:
                if not 0 <= int(id_) <= MAX_TOKEN_ID:
                    raise ValueError("no token id")
                numbered[int(id_)] = token
    except (AttributeError, TypeError, ValueError):
        raise InvalidCheckpoint(
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} does not map ids to tokens. "
            f"The file is damaged; download it again."
        ) from None
    return numbered


def _added_tokens_file(folder: Path) -> dict[int, str]:
    table = read_json_object(folder / "added_tokens.json")
    if not all(type(id_) is int and 0 <= id_ <= MAX_TOKEN_ID for id_ in table.values()):
        raise InvalidCheckpoint(
            f"{folder / 'added_tokens.json'} does not map tokens to ids. The file is damaged; download it again."
        )
    return {id_: content for content, id_ in table.items()}


def _ids(source: dict[str, Any], key: str, file: str) -> list[int]:
    value = source.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    # Many files write -1 for a token that there is not.
    ids = [id_ for id_ in ids if id_ != -1]
    if not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise InvalidCheckpoint(
            f"{key} in {file} is {value!r}, but it is a token id or a list of token ids. Correct the file."
        )
    return ids
