"""tekken.json: Mistral's own file of tokens and ranks, the only tokenizer file of some of its models."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import MAX_TOKEN_ID, AddedToken, read_json_object
from asyncllm.text.tokenizers.byte_pairs import byte_pair_pipeline

__all__ = ["tekken_pipeline"]

_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that do not name them."""


def tekken_pipeline(path: Path) -> HubTokenizer:
    """Return the pipeline of a tekken.json. Special tokens come first; those without a name are `<SPECIAL_ID>`. Raises
    InvalidCheckpoint."""
    fields = read_json_object(path)
    try:
        config = fields["config"]
        size, first = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        listed: list[dict[str, Any]] = fields.get("special_tokens") or [
            {"rank": rank, "token_str": text} for rank, text in enumerate(_FIRST_SPECIAL[:first])
        ]
        names = {int(each["rank"]): str(each["token_str"]) for each in listed}
        # The file has more tokens than the model, which uses those of the lowest ranks.
        ranks = {
            base64.b64decode(each["token_bytes"], validate=True): int(each["rank"])
            for each in fields["vocab"][: size - first]
        }
        words = str(config["pattern"])
        whole = 0 < first < size <= MAX_TOKEN_ID and set(ranks.values()) == set(range(size - first))
        if not whole or b"" in ranks or not names.keys() <= set(range(first)):
            raise ValueError(f"{len(ranks)} tokens after {first} special ones do not make {size}")
        named = {id_: AddedToken(names.get(id_, f"<SPECIAL_{id_}>")) for id_ in range(first)}
        return byte_pair_pipeline(path, ranks, words, named, first=first, prefix=("<s>",))
    except InvalidCheckpoint:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for a pattern that it cannot read.
        raise InvalidCheckpoint(
            f"{path} is not a file of Mistral's tokens: {error!r}. The file is truncated or damaged; download it again."
        ) from None
