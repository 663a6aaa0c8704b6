"""Determines whether a checkpoint has an output embedding of its own: its tensors are more reliable than its
config.json."""

from __future__ import annotations

import logging

import msgspec

from asyncllm.errors import InvalidCheckpoint
from asyncllm.models.config import ModelConfig
from asyncllm.models.decoder import SCORE_ROWS, DecoderLM
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.stream import FLOAT_DTYPES
from asyncllm.models.model_config import ScoreHeadConfig

__all__ = ["SCORING", "resolve_head"]

SCORING = ("ForSequenceClassification", "ForRewardModel")
"""Endings of the names of classes that score sequences."""

logger = logging.getLogger("asyncllm")


def resolve_head(
    config: ModelConfig, family: type[DecoderLM], checkpoint: Checkpoint, *, base_class: bool
) -> ModelConfig:
    """Return `config` with `tied`, `stored_as_head` and `has_head` set according to the tensors. `base_class`:
    config.json names a class without a head.

    A stored head that differs from the embedding is used, with a warning, even if the config ties them. A file without
    a head belongs to a model without one if its class has none, or if the names of its tensors show that it was saved
    from such a class. A file that lost its head is left for the loader to refuse. Raises InvalidCheckpoint for a file
    that cannot be read.
    """
    if config.architecture.endswith(SCORING):
        return msgspec.structs.replace(config, has_head=False, score_head=_score_head(checkpoint))
    if family.head_name in checkpoint.tensors:
        if config.tied and _is_alone(family, checkpoint):
            return msgspec.structs.replace(config, stored_as_head=True)
        if config.tied and not _repeats_embedding(family, checkpoint):
            logger.warning(
                "%s: config.json has tie_word_embeddings = true, but %s differs from the token embedding. The file's "
                "head is used; set tie_word_embeddings to false to silence this.",
                checkpoint.folder,
                family.head_name,
            )
            return msgspec.structs.replace(config, tied=False)
        return config
    saved_bare = not any(f".{family.base_prefix}" in f".{name}" for name in checkpoint.tensors)
    if base_class or (saved_bare and not config.tied):
        return msgspec.structs.replace(config, has_head=False)
    return config


def _score_head(checkpoint: Checkpoint) -> ScoreHeadConfig:
    """Return the kind of head that the tensors form. Raises InvalidCheckpoint if there is none."""
    names = [name for name, target in SCORE_ROWS.items() if target == "score.out"]
    for name in names:
        entry = checkpoint.tensors.get(f"{name}.weight")
        if entry is not None and len(entry.shape) == 2 and entry.shape[0]:
            inner = "score.0.weight" in checkpoint.tensors
            bias = f"{name}.bias" in checkpoint.tensors
            return ScoreHeadConfig(num_labels=entry.shape[0], inner=inner, bias=bias)
    raise InvalidCheckpoint(
        f"{checkpoint.folder}: config.json names a class that scores sequences, and the files hold no head for it "
        f"({', '.join(f'{name}.weight' for name in names)}). Download the files again, or name the decoder's own class."
    )


def _embeddings(family: type[DecoderLM]) -> list[str]:
    """Return the modules that may hold the token embedding."""
    table = family.weights.with_optional_prefix(family.base_prefix)
    return [pattern for pattern, target in table.rows.items() if target == "embed"]


def _is_alone(family: type[DecoderLM], checkpoint: Checkpoint) -> bool:
    """Return whether the stored head stands for a token embedding that the files lack."""
    modules = _embeddings(family)
    return bool(modules) and not any(name.rpartition(".")[0] in modules for name in checkpoint.tensors)


def _repeats_embedding(family: type[DecoderLM], checkpoint: Checkpoint) -> bool:
    """Return whether the stored head is a copy of the token embedding, or there is nothing to compare it with."""
    names = (f"{module}.weight" for module in _embeddings(family))
    embedding = next((name for name in names if name in checkpoint.tensors), None)
    if embedding is None:
        return True
    if any(checkpoint.tensors[name].dtype not in FLOAT_DTYPES for name in (embedding, family.head_name)):
        return False
    return checkpoint.equal(embedding, family.head_name)
