"""Data sets on the hub that LMDeploy refers to by name, read with the library `datasets`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from asyncllm.errors import InvalidParameter, short

__all__ = ["HUB_DATASETS", "read_hub_texts"]


class HubDataset(NamedTuple):
    """The location and layout of a data set."""

    repository: str
    part: str | None = None
    split: str = "train"
    rows_of_one_text: int = 1
    """Number of consecutive rows that form one text."""


HUB_DATASETS: Mapping[str, HubDataset] = {
    "wikitext2": HubDataset("Salesforce/wikitext", "wikitext-2-raw-v1", rows_of_one_text=64),
    "c4": HubDataset("allenai/c4", "en"),
    "ptb": HubDataset("ptb-text-only/ptb_text_only", "penn_treebank", rows_of_one_text=64),
    "pileval": HubDataset("mit-han-lab/pile-val-backup", split="validation"),
    "gsm8k": HubDataset("openai/gsm8k", "main"),
    "neuralmagic_calibration": HubDataset("neuralmagic/LLM_compression_calibration"),
    "open-platypus": HubDataset("garage-bAInd/Open-Platypus"),
    "openwebtext": HubDataset("Skylion007/openwebtext"),
}

MAX_ROWS = 16_384

_TEXTS = ("text", "sentence", "content")
_TURNS = (("question", "answer"), ("instruction", "output"))
"""Columns with questions and answers."""


def read_hub_texts(name: str) -> list[str | list[dict[str, Any]]]:
    """Return the first texts or conversations of one of `HUB_DATASETS`. Streams rows, and blocks on the network.

    Raises InvalidParameter if the library is missing, the hub cannot be reached, or no row can be read.
    """
    found = HUB_DATASETS[name]
    instead = "or give a .txt or .jsonl file of your own, or leave it out for the bundled texts."
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise InvalidParameter(
            f"calib_dataset: {name} is read with the library datasets. `pip install datasets`, {instead}",
            "calib_dataset",
        ) from None
    try:
        rows = datasets.load_dataset(found.repository, found.part, split=found.split, streaming=True)
        texts = [text for row in islice(rows, MAX_ROWS) if (text := _text_of(row))]
    except Exception as error:
        # The library leaks exceptions of the libraries that it reads and downloads with.
        raise InvalidParameter(
            f"calib_dataset: {name}, {found.repository} on the hub, could not be read "
            f"({type(error).__name__}: {short(str(error))}). Check the network, {instead}",
            "calib_dataset",
        ) from error
    if not texts:
        raise InvalidParameter(
            f"calib_dataset: {found.repository} on the hub has no column that is known to hold texts. Save it as a "
            f"file, {instead}",
            "calib_dataset",
        )
    return list(_joined(texts, found.rows_of_one_text))


def _text_of(row: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    if isinstance(row.get("messages"), list):
        return row["messages"] or None
    for asked, answered in _TURNS:
        if row.get(asked) and row.get(answered):
            question = "\n".join(filter(None, (row[asked], row.get("input"))))
            return [{"role": "user", "content": question}, {"role": "assistant", "content": row[answered]}]
    text = next((row[name] for name in _TEXTS if isinstance(row.get(name), str)), "")
    return text.strip() or None


def _joined(texts: list[str | list[dict[str, Any]]], rows_of_one_text: int) -> Iterator[str | list[dict[str, Any]]]:
    if rows_of_one_text == 1:
        yield from texts
        return
    lines = [text for text in texts if isinstance(text, str)]
    for start in range(0, len(lines), rows_of_one_text):
        yield "\n".join(lines[start : start + rows_of_one_text])
