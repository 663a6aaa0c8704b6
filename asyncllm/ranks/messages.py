"""The messages between the engine's process and a rank, as msgpack.

A step's `Batch` and `StepOutput` are sent unchanged. Grammars, as source texts, and pixels of images are sent ahead of
the step. Tensors among the results are sent as bytes; new weights are in memory that both processes map
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
from asyncllm.ranks.shared_tensors import TensorHeader
from asyncllm.text.grammars.bridge import AnswerGrammar, GrammarStart, GrammarText

__all__ = [
    "AdapterTaken",
    "CarriedOut",
    "CarryOut",
    "DropAdapter",
    "Failure",
    "ForgetGrammars",
    "FromRank",
    "GrammarTaken",
    "Ping",
    "Pong",
    "Ready",
    "RemoteError",
    "RunStep",
    "Start",
    "StepDone",
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
"""Extension type of msgpack: the constraint of an answer, as a `GrammarReference`."""

GrammarReference = tuple[int | None, GrammarStart]
"""The number of a grammar that the ranks have compiled, or None, and where in the answer it begins."""


class RemoteError(RuntimeError):
    """An error of a rank that is not one of asyncllm's own: its type and message, with the rank's traceback as a
    note."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Load the model. The first message to a rank."""

    config: EngineConfig
    model_path: str
    rank: int = 0
    num_ranks: int = 1
    rendezvous_file: str = ""
    """The file of `distributed.group.Rendezvous`, for several ranks."""


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """Run a step, after the earlier ones."""

    batch: Batch


class CarryOut(msgspec.Struct, tag=True, frozen=True):
    """Carry out a command, while no step is in flight."""

    command: Sleep | Wake | TakeVocabulary


class TakeAdapter(msgspec.Struct, tag=True, frozen=True):
    """Read an adapter, while steps run."""

    adapter: LoadAdapter


class DropAdapter(msgspec.Struct, tag=True, frozen=True):
    """Forget an adapter that no unread step names."""

    number: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Send a `Pong` at once, whatever is being computed."""


class TakeGrammar(msgspec.Struct, tag=True, frozen=True):
    """Compile a grammar, while steps run."""

    grammar: GrammarText


class ForgetGrammars(msgspec.Struct, tag=True, frozen=True):
    """Forget grammars that no row uses any more."""

    numbers: list[int]


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    """Take new weights. The file descriptor of their memory comes with the message."""

    tensors: list[TensorHeader]
    """The tensors in that memory, in order."""


class Failure(msgspec.Struct, frozen=True):
    """An exception sent to another process."""

    kind: str
    """Its class; StepFailed, StepDropped and the errors of asyncllm.errors are restored as themselves."""
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
        """Return the equivalent exception in this process."""
        made = self._exception()
        if self.cause is not None:
            made.__cause__ = self.cause.error()
        if self.traceback:
            made.add_note(f"In the rank's process:\n{self.traceback}")
        return made

    def _exception(self) -> Exception:
        if self.kind in ("StepFailed", "StepDropped"):
            return {"StepFailed": StepFailed, "StepDropped": StepDropped}[self.kind](self.message)
        own = OtherRankRefused if self.kind == "OtherRankRefused" else getattr(errors, self.kind, None)
        if not (isinstance(own, type) and issubclass(own, AsyncLLMError)):
            return RemoteError(f"{self.kind}: {self.message}")
        if issubclass(own, InvalidParameter | UnsupportedFeature):
            return own(self.message, self.param)
        error = own.__new__(own)
        # Its own constructor may take other arguments than the message.
        error.args = (self.message,)
        return error


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded, or failed to load."""

    limits: Limits | None
    failure: Failure | None = None


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """A step is done. One rank sends the results; the others report that they have finished it."""

    step: int
    output: StepOutput | None = None
    failure: Failure | None = None


class CarriedOut(msgspec.Struct, tag=True, frozen=True):
    """A command was carried out, refused, or failed."""

    failure: Failure | None = None


class GrammarTaken(msgspec.Struct, tag=True, frozen=True):
    """A grammar is compiled, or failed to compile."""

    number: int
    failure: Failure | None = None


class AdapterTaken(msgspec.Struct, tag=True, frozen=True):
    """An adapter is in host memory, or could not be read."""

    number: int
    digest: str = ""
    failure: Failure | None = None


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Answers a `Ping`: the rank is alive."""


class TakePixels(msgspec.Struct, tag=True, frozen=True):
    """Take the pixels of an image, the tower's input, for the next step."""

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
    | Ping
)
FromRank = Ready | StepDone | CarriedOut | AdapterTaken | GrammarTaken | Pong


def _pack(value: Any) -> Any:
    """Return the msgpack form of a result value that msgpack does not know."""
    if isinstance(value, AnswerGrammar):
        return msgspec.msgpack.Ext(_GRAMMAR, msgspec.msgpack.encode(value.reference()))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        values = value.detach().to("cpu", torch.float32).contiguous()
        shape = msgspec.msgpack.encode(list(values.shape))
        return msgspec.msgpack.Ext(_TENSOR, bytes([len(shape)]) + shape + values.numpy().tobytes())
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in which it reaches another process")


def _unpack(code: int, data: memoryview) -> Any:
    """Return the tensor encoded by `_pack`."""
    import torch

    if code != _TENSOR:
        raise ValueError(f"extension type {code} is unknown")
    start = 1 + data[0]
    shape = msgspec.msgpack.decode(data[1:start], type=list[int])
    return torch.from_numpy(np.frombuffer(bytearray(data[start:]), np.float32)).view(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_from_rank = msgspec.msgpack.Decoder(FromRank, ext_hook=_unpack)
_grammar_reference = msgspec.msgpack.Decoder(GrammarReference)
_NO_BYTES = b"\xc4\x00"
"""msgpack's encoding of empty bytes."""
_BYTES = b"\xc6"
"""The beginning of its encoding of many bytes, before their number."""


def encode(message: ToRank | FromRank) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def encode_pixels(pixels: NDArray[np.float32]) -> tuple[bytes, memoryview]:
    """Return the bytes of a `TakePixels` in two pieces; the second is the array's own memory."""
    head = _encoder.encode(TakePixels(list(pixels.shape), bytearray())).removesuffix(_NO_BYTES)
    values = np.ascontiguousarray(pixels, np.float32).data.cast("B")
    return head + _BYTES + len(values).to_bytes(4, "big"), values


def decode_from_rank(data: bytes | memoryview) -> FromRank:
    """Return the message from a rank."""
    message: FromRank = _from_rank.decode(data)
    return message


def decoder_to_rank(grammar: Callable[[int | None, GrammarStart], Any]) -> Callable[[memoryview], ToRank]:
    """Return a decoder of messages to a rank; `grammar` restores the constraint of an answer."""

    def unpack(code: int, data: memoryview) -> Any:
        if code != _GRAMMAR:
            raise ValueError(f"extension type {code} is unknown")
        return grammar(*_grammar_reference.decode(data))

    return msgspec.msgpack.Decoder(ToRank, ext_hook=unpack).decode
