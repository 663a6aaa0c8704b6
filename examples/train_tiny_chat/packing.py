"""Packs generated documents into rows of equal length, in several processes."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .conversation import document
from .tool_conversation import document_with_tools

Tokens = npt.NDArray[np.uint16]
Kinds = npt.NDArray[np.uint8]
Shard = TypeVar("Shard")

_OPEN_ROWS = 48
_FULL_ENOUGH = 12
_DOCUMENTS_PER_BATCH = 256
_DROP_BOS_SHARE = 0.1


@dataclass
class Row:
    """A row that is being filled; ``kinds`` says per token which loss weight it gets, 0 for padding."""

    tokens: list[int]
    kinds: list[int]


def _encoded_documents(tokenizer: Tokenizer, random: Random, room: int, name: str, tools: float) -> Iterator[Row]:
    while True:
        documents = [
            document_with_tools(random, room) if random.random() < tools else document(random, room)
            for _ in range(_DOCUMENTS_PER_BATCH)
        ]
        texts = [segment.text.replace("tiny-chat", name) for segments in documents for segment in segments]
        encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for segments in documents:
            row = Row([], [])
            for segment in segments:
                ids = next(encodings).ids
                row.tokens += ids
                row.kinds += [segment.kind] * len(ids)
            if random.random() < _DROP_BOS_SHARE:
                # A client that forgets the first token should still get sensible answers.
                del row.tokens[0], row.kinds[0]
            yield row


def pack(
    tokenizer: Tokenizer, seed: str, rows: int, length: int, name: str = "tiny-chat", tools: float = 0.0
) -> tuple[Tokens, Kinds]:
    """Builds ``rows`` rows of whole documents: no document is cut, the rest of a row is padding. ``name`` is what the
    model calls itself, ``tools`` the share of documents in which the user offers tools."""
    random = Random(seed)
    tokens = np.zeros((rows, length), np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    open_rows: list[Row] = []
    done = 0
    for encoded in _encoded_documents(tokenizer, random, length, name, tools):
        if len(encoded.tokens) > length:
            continue
        for row in open_rows:
            if len(row.tokens) + len(encoded.tokens) <= length:
                break
        else:
            row = Row([], [])
            open_rows.append(row)
        row.tokens += encoded.tokens
        row.kinds += encoded.kinds
        if len(row.tokens) < length - _FULL_ENOUGH and len(open_rows) <= _OPEN_ROWS:
            continue
        fullest = max(open_rows, key=lambda candidate: len(candidate.tokens))
        open_rows.remove(fullest)
        tokens[done, : len(fullest.tokens)] = fullest.tokens
        kinds[done, : len(fullest.kinds)] = fullest.kinds
        done += 1
        if done == rows:
            break
    return tokens, kinds


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_json: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer.from_str(tokenizer_json)


def _make_in_worker(make: Callable[..., Shard], seed: str, sizes: tuple[Any, ...]) -> Shard:
    assert _worker_tokenizer is not None
    return make(_worker_tokenizer, seed, *sizes)


class ShardStream(Generic[Shard]):
    """An endless, seeded stream of shards that worker processes keep ahead of the trainer.

    Shards come in the order of their numbers whatever the timing of the workers, so the data depend on
    the seed alone and no question is seen more often than it is drawn.
    """

    def __init__(self, make: Callable[..., Shard], tokenizer: Tokenizer, seed: int, workers: int) -> None:
        """``make`` is a function of a module, called as ``make(tokenizer, seed, *sizes)``, such as ``pack``."""
        self._make = make
        self._seed = seed
        self._ahead = 2 * workers
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer.to_str(),),
        )

    def shards(self, stage: str, *sizes: Any) -> Iterator[Shard]:
        """Yields the shards of one stage; ``sizes`` are those that ``make`` takes, as rows and their length."""
        pending: deque[Future[Shard]] = deque()
        number = 0
        try:
            while True:
                while len(pending) < self._ahead:
                    seed = f"{self._seed}/{stage}/{number}"
                    pending.append(self._pool.submit(_make_in_worker, self._make, seed, sizes))
                    number += 1
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
