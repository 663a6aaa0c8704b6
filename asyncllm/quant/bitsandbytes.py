"""bitsandbytes, as transformers writes it: nf4 and fp4 in blocks, and int8. Weights are expanded while they are
read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.layers.linear_method import LinearMethod
from asyncllm.quant.expansion import Expansion, expect, halves, modules_of
from asyncllm.quant.scheme import Scheme, register
from asyncllm.quant.settings import Header, QuantSettings

__all__ = ["BitsAndBytes"]

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_INT8_LARGEST = 127


@register("bitsandbytes")
class BitsAndBytes(Scheme):
    """A 4-bit NAME.weight has further tensors such as NAME.weight.absmax; an int8 one has NAME.SCB.

    The files determine the kind, regardless of `load_in_4bit` and `load_in_8bit`.
    """

    @classmethod
    def read(cls, settings: QuantSettings) -> BitsAndBytes:
        return cls()

    def method(self, module: str, tensors: Mapping[str, Header]) -> LinearMethod | None:
        return None

    def expansions(
        self, headers: Mapping[str, Header], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> Iterator[Expansion]:
        for name in headers:
            if name.endswith(".absmax") and not any(
                f"{name.removesuffix('absmax')}{each}" in headers for each in _STATES
            ):
                raise InvalidCheckpoint(
                    f"tensor {short(name)} has no {_STATES[0]} beside it. Download the files again."
                )
        states = {name: state for name in headers for state in _STATES if name.endswith(f".{state}")}
        blobs = read(list(states))
        for name, state in states.items():
            weight = name.removesuffix(f".{state}")
            own = {each.removeprefix(f"{weight}."): headers[each] for each in headers if each.startswith(f"{weight}.")}
            yield _four_bits(weight, own, headers.get(weight), _State.read(name, blobs[name]))
        for module, tensors in modules_of(headers).items():
            if "SCB" in tensors or ("weight" in tensors and tensors["weight"].dtype == "I8"):
                yield _int8(module, tensors)


class _State(NamedTuple):
    """The contents of the JSON beside a 4-bit weight."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float
    """Added to the blocks' largest magnitudes if these are stored in 8 bits."""

    @staticmethod
    def read(name: str, blob: Tensor) -> _State:
        """Read the JSON. Raises InvalidCheckpoint."""
        try:
            fields = json.loads(bytes(blob.view(torch.uint8).tolist()))
            rows, columns = (int(each) for each in fields["shape"])
            nested = int(fields.get("nested_blocksize", 1))
            state = _State((rows, columns), int(fields["blocksize"]), nested, float(fields.get("nested_offset", 0)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidCheckpoint(
                f"tensor {short(name)} describes no matrix ({error!r}). Download it again."
            ) from None
        if min(*state.shape, state.block, state.nested_block) < 1:
            raise InvalidCheckpoint(f"tensor {short(name)} says {state}, which cannot be. Download it again.")
        return state


def _four_bits(weight: str, tensors: Mapping[str, Header], codes: Header | None, state: _State) -> Expansion:
    """Return the expansion of a 4-bit weight. Raises InvalidCheckpoint, UnsupportedModel."""
    count = state.shape[0] * state.shape[1]
    blocks = -(-count // state.block)
    if codes is None:
        raise InvalidCheckpoint(f"tensor {short(weight)} is missing. Download the files again.")
    size = {"U8": 2, "F16": 4, "BF16": 4, "F32": 8}.get(codes.dtype)
    if size is None:
        raise UnsupportedModel(f"tensor {short(weight)} is {codes.dtype}, where U8, F16, BF16 or F32 is read.")
    words = -(-count // size)
    if codes.shape not in ((words, 1), (1, words)):
        raise InvalidCheckpoint(
            f"tensor {short(weight)} has shape {short(list(codes.shape))}, and {state.shape[0]} x {state.shape[1]} "
            f"numbers of 4 bits take {[words, 1]}. Download it again."
        )
    nested = "absmax" in tensors and tensors["absmax"].dtype == "U8"
    sources = {
        "absmax": expect(weight, tensors, "absmax", ("U8", "F32"), (blocks,)),
        "quant_map": expect(weight, tensors, "quant_map", ("F32",), (16,)),
    }
    if nested:
        outer = -(-blocks // state.nested_block)
        sources["nested_absmax"] = expect(weight, tensors, "nested_absmax", ("F32",), (outer,))
        sources["nested_quant_map"] = expect(weight, tensors, "nested_quant_map", ("F32",), (256,))
    left_out = [f"{weight}.{each}" for each in tensors if each not in sources]
    return Expansion(weight, state.shape, {"": weight, **sources}, partial(_expand_four, state=state), left_out)


def _expand_four(tensors: Mapping[str, Tensor], *, state: _State) -> Tensor:
    count = state.shape[0] * state.shape[1]
    codes = halves(tensors[""].contiguous().view(torch.uint8).flatten(), high_first=True)[:count]
    largest = tensors["absmax"]
    if largest.dtype == torch.uint8:
        outer = tensors["nested_absmax"].repeat_interleave(state.nested_block)[: len(largest)]
        largest = tensors["nested_quant_map"][largest.int()] * outer + state.offset
    if not (largest.isfinite().all() and tensors["quant_map"].isfinite().all()):
        raise InvalidCheckpoint("its absmax and quant_map are not all finite; download it again")
    values = tensors["quant_map"][codes.int()]
    return (values * largest.repeat_interleave(state.block)[:count]).view(state.shape)


def _int8(module: str, tensors: Mapping[str, Header]) -> Expansion:
    """Return the expansion of an int8 weight with a largest magnitude for each output feature. Raises
    InvalidCheckpoint, UnsupportedModel."""
    sources = {"weight": expect(module, tensors, "weight", ("I8",))}
    shape = tensors["weight"].shape
    if len(shape) != 2:
        raise InvalidCheckpoint(f"tensor {short(sources['weight'])} has shape {list(shape)}, and is not a matrix.")
    sources["SCB"] = expect(module, tensors, "SCB", ("F32", "F16"), (shape[0],), (1, shape[0]))
    if "weight_format" in tensors:
        sources["weight_format"] = f"{module}.weight_format"
    return Expansion(f"{module}.weight", shape, sources, _expand_int8)


def _expand_int8(tensors: Mapping[str, Tensor]) -> Tensor:
    if "weight_format" in tensors and tensors["weight_format"].any():
        raise InvalidCheckpoint("its weight_format is not that of plain rows (0), but of one kind of GPU")
    largest = tensors["SCB"].float().reshape(-1, 1)
    if not largest.isfinite().all():
        raise InvalidCheckpoint("its SCB is not finite; download it again")
    return tensors["weight"].float() * (largest / _INT8_LARGEST)
