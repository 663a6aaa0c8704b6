"""The bytes of tokenizer.model: types of pieces, which the library can neither report nor change.

ModelProto is a Protocol Buffers message whose field 1 repeats SentencePiece, with the piece's type in field 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

__all__ = ["NORMAL", "UNUSED", "USER_DEFINED", "WITHOUT_DUMMY_PREFIX", "piece_types", "with_unused_pieces"]

NORMAL, UNUSED, USER_DEFINED = 1, 5, 4
PIECES, TYPE = 0x0A, 0x18
"""Tags of the two fields."""
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""ModelProto.normalizer_spec.add_dummy_prefix = false. Every parser merges a repeated message field into the earlier
one, so appending these bytes to a model overrides this one setting."""


def piece_types(model: bytes, ids: Collection[int]) -> dict[int, int]:
    """Return id -> type of these pieces, without those that the model lacks. Raises ValueError or IndexError for bytes
    that are not a model."""
    types = {}
    for id_, (_, start, end) in enumerate(_pieces(model)):
        if id_ in ids:
            types[id_] = NORMAL
            while start < end:
                tag, start = _varint(model, start)
                value = start
                start = _skip(model, tag, start)
                if tag == TYPE:
                    types[id_] = _varint(model, value)[0]
    return types


def with_unused_pieces(model: bytes, ids: Collection[int]) -> bytes:
    """Return the model with these pieces marked as unused, so that no text is encoded to them. Raises like
    `piece_types`."""
    parts: list[bytes] = []
    last = 0
    for id_, (field, start, end) in enumerate(_pieces(model)):
        if id_ in ids:
            # The last value of a field applies.
            piece = model[start:end] + bytes([TYPE, UNUSED])
            parts += [model[last:field], bytes([PIECES]), _as_varint(len(piece)), piece]
            last = end
    return b"".join([*parts, model[last:]])


def _pieces(model: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets of each piece: start of its field, start and end of its content."""
    at = 0
    while at < len(model):
        field = at
        tag, start = _varint(model, at)
        at = _skip(model, tag, start)
        if tag == PIECES:
            yield field, _varint(model, start)[1], at


def _skip(model: bytes, tag: int, at: int) -> int:
    """Return the end of the field whose value begins at `at`."""
    match tag & 7:
        case 0:
            return _varint(model, at)[1]
        case 1:
            return at + 8
        case 2:
            size, at = _varint(model, at)
            return at + size
        case 5:
            return at + 4
    raise ValueError("no field of this kind")


def _varint(model: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it."""
    value = shift = 0
    while True:
        byte = model[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
