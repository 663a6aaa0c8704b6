"""What the engine's process and a rank say to each other, as msgpack.

A step's `Batch` and `StepOutput` travel as they are. Ahead of it go grammars, as the texts that they were made of, and
the pixels of images. Tensors among the results travel as their bytes; new weights lie in memory that both processes map
(`ranks.shared_tensors`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncllm import errors
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, InvalidParameter, UnsupportedFeature
from asyncllm.protocol import (
    Batch,
    Limits,
    LoadAdapter,
    OtherRankRefused,
    Sleep,
    StepDropped,
    StepFailed,
    StepOutput,
    TakeVocabulary,
    Wake,
)
from asyncllm.text.grammars.bridge import AnswerGrammar, GrammarStart, GrammarText

__all__ = [
    "AdapterTaken",
    "AreYouThere",
    "CarriedOut",
    "CarryOut",
    "DropAdapter",
    "Failure",
    "ForgetGrammars",
    "FromRank",
    "GrammarTaken",
    "Ready",
    "RemoteError",
    "RunStep",
    "Start",
    "StepDone",
    "StillHere",
    "TakeAdapter",
    "TakeGrammar",
    "TakePixels",
    "TakeWeights",
    "ToRank",
    "decode_from_rank",
    "decoder_to_rank",
    "encode",
    "encode_pixels",
]

_TENSOR = 1
"""Extension type of msgpack: a float32 tensor on the host, as its shape and its bytes."""
_GRAMMAR = 2
"""The one of what an answer is held to: the grammar's number, and where in an answer it begins."""

Told = tuple[int | None, GrammarStart]


class RemoteError(RuntimeError):
    """What a rank raised that is no error of asyncllm's own: its type and message, with the rank's traceback as a
    note."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load the model. The first message to a rank."""

    config: EngineConfig
    model_path: str
    rank: int = 0
    num_ranks: int = 1
    meeting_file: str = ""
    """Where several ranks find each other."""


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """Run a step after those before it."""

    batch: Batch


class CarryOut(msgspec.Struct, tag=True, frozen=True):
    """Carry out a command, while no step is in flight."""

    command: Sleep | Wake | TakeVocabulary


class TakeAdapter(msgspec.Struct, tag=True, frozen=True):
    """Read an adapter, beside the steps."""

    adapter: LoadAdapter


class DropAdapter(msgspec.Struct, tag=True, frozen=True):
    """Forget an adapter that no unread step names."""

    number: int


class AreYouThere(msgspec.Struct, tag=True, frozen=True):
    """Say so at once, whatever is computed."""


class TakeGrammar(msgspec.Struct, tag=True, frozen=True):
    """Compile a grammar, beside the steps."""

    grammar: GrammarText


class ForgetGrammars(msgspec.Struct, tag=True, frozen=True):
    """Forget grammars that no row is held to any more."""

    numbers: list[int]


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Take new weights. The file descriptor of their memory comes along."""

    tensors: list[tuple[str, str, list[int]]]
    """Name, dtype and shape of each, in order."""


class Failure(msgspec.Struct, frozen=True):
    """An exception on its way to another process."""

    kind: str
    """Its class; StepFailed and StepDropped, and what of asyncllm.errors stands for itself."""
    message: str
    param: str | None = None
    traceback: str = ""
    cause: Failure | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception and its causes."""
        import traceback

        return cls(
            type(error).__name__,
            str(error),
            getattr(error, "param", None),
            "" if isinstance(error, AsyncLLMError) else "".join(traceback.format_exception(error, chain=False)),
            None if error.__cause__ is None else cls.of(error.__cause__),
        )

    def error(self) -> Exception:
        """Return an exception that says the same here."""
        made = self._made()
        if self.cause is not None:
            made.__cause__ = self.cause.error()
        if self.traceback:
            made.add_note(f"In the rank's process:\n{self.traceback}")
        return made

    def _made(self) -> Exception:
        if self.kind in ("StepFailed", "StepDropped"):
            return {"StepFailed": StepFailed, "StepDropped": StepDropped}[self.kind](self.message)
        own = OtherRankRefused if self.kind == "OtherRankRefused" else getattr(errors, self.kind, None)
        if not (isinstance(own, type) and issubclass(own, AsyncLLMError)):
            return RemoteError(f"{self.kind}: {self.message}")
        if issubclass(own, InvalidParameter | UnsupportedFeature):
            return own(self.message, self.param)
        error = own.__new__(own)
        # Its own constructor may take what the message was made of.
        error.args = (self.message,)
        return error


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded, or could not be."""

    limits: Limits | None
    failure: Failure | None = None


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """A step is over. One rank sends what it gave; the others say that they have come as far."""

    step: int
    output: StepOutput | None = None
    failure: Failure | None = None


class CarriedOut(msgspec.Struct, tag=True, frozen=True):
    """A command is carried out, or was refused, or failed."""

    failure: Failure | None = None


class GrammarTaken(msgspec.Struct, tag=True, frozen=True):
    """A grammar is compiled, or could not be."""

    number: int
    failure: Failure | None = None


class AdapterTaken(msgspec.Struct, tag=True, frozen=True):
    """An adapter is in host memory, or could not be read."""

    number: int
    digest: str = ""
    failure: Failure | None = None


class StillHere(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AreYouThere`."""


class TakePixels(msgspec.Struct, tag=True, frozen=True):
    """Take what a tower is shown of an image, for the next step."""

    shape: list[int]
    values: bytearray
    """In float32."""


ToRank = (
    Start
    | RunStep
    | CarryOut
    | TakeAdapter
    | DropAdapter
    | TakeGrammar
    | ForgetGrammars
    | TakeWeights
    | TakePixels
    | AreYouThere
)
FromRank = Ready | StepDone | CarriedOut | AdapterTaken | GrammarTaken | StillHere


def _pack(value: Any) -> Any:
    """Return what msgpack takes for a result's value that it does not know."""
    if isinstance(value, AnswerGrammar):
        return msgspec.msgpack.Ext(_GRAMMAR, msgspec.msgpack.encode(value.told()))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        values = value.detach().to("cpu", torch.float32).contiguous()
        shape = msgspec.msgpack.encode(list(values.shape))
        return msgspec.msgpack.Ext(_TENSOR, bytes([len(shape)]) + shape + values.numpy().tobytes())
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in which it reaches another process")


def _unpack(code: int, data: memoryview) -> Any:
    """Return the tensor that `_pack` has packed."""
    import numpy as np
    import torch

    if code != _TENSOR:
        raise ValueError(f"extension type {code} is unknown")
    start = 1 + data[0]
    shape = msgspec.msgpack.decode(data[1:start], type=list[int])
    return torch.from_numpy(np.frombuffer(bytearray(data[start:]), np.float32)).view(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_from_rank = msgspec.msgpack.Decoder(FromRank, ext_hook=_unpack)
_told = msgspec.msgpack.Decoder(Told)
_NO_BYTES = b"\xc4\x00"
"""How msgpack writes no bytes, and"""
_BYTES = b"\xc6"
"""begins many, before their number."""


def encode(message: ToRank | FromRank) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def encode_pixels(pixels: NDArray[np.float32]) -> tuple[bytes, memoryview]:
    """Return the bytes of a `TakePixels` in two pieces, of which the second is the array's own memory."""
    head = _encoder.encode(TakePixels(list(pixels.shape), bytearray())).removesuffix(_NO_BYTES)
    values = np.ascontiguousarray(pixels, np.float32).data.cast("B")
    return head + _BYTES + len(values).to_bytes(4, "big"), values


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Return the message of a rank."""
    message: FromRank = _from_rank.decode(data)
    return message


def decoder_to_rank(grammar: Callable[[int | None, GrammarStart], Any]) -> Callable[[memoryview], ToRank]:
    """Return what decodes messages to a rank; `grammar` makes again what an answer is held to."""

    def unpack(code: int, data: memoryview) -> Any:
        if code != _GRAMMAR:
            raise ValueError(f"extension type {code} is unknown")
        return grammar(*_told.decode(data))

    return msgspec.msgpack.Decoder(ToRank, ext_hook=unpack).decode
