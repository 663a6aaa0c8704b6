"""Gluon kernels on a CPU: the functions below `gluon.jit` run as Python, partitions and blocks as threads.

What is modelled is what the numbers depend on, not layouts. Copies by TMA spoil their destination when they are issued
and arrive at the wait for them; asynchronous products and stores read their operands at theirs, so that a stage that is
released too early, or a buffer that is filled too early, gives wrong numbers. A wait of more than `PATIENCE` seconds is
a deadlock.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import threading
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

PATIENCE = 60.0

_DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int16: gl.int16,
    torch.int32: gl.int32, torch.int64: gl.int64, torch.uint8: gl.uint8,
}  # fmt: skip
_TORCH = {str(own): other for other, own in _DTYPES.items()}

_local = threading.local()


class Deadlock(Exception):
    """A thread of a block has waited for a long time."""


class Value:
    """A tensor in registers, with its layout; of a product that is not done, without numbers yet."""

    def __init__(self, data: Tensor | None, layout: Any = None) -> None:
        self.data = data
        self.layout = layout

    @property
    def known(self) -> Tensor:
        assert self.data is not None, "a sum is read before its product is done"
        return self.data

    @property
    def dtype(self) -> Any:
        return _DTYPES[self.known.dtype]

    @property
    def shape(self) -> torch.Size:
        return self.known.shape

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        wanted = _TORCH[str(dtype)]
        return Value(self.known.view(wanted) if bitcast else self.known.to(wanted), self.layout)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.known[index], self.layout)

    def __neg__(self) -> Value:
        return Value(-self.known, self.layout)

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.known.reshape(shape), self.layout)

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.known.permute(order), self.layout)

    def split(self) -> tuple[Value, ...]:
        return tuple(Value(part, self.layout) for part in self.known.unbind(-1))


def _operation(name: str, *, turned: bool = False) -> Callable[[Any, Any], Value]:
    def apply(self: Value, other: Any) -> Value:
        sides = (_plain(other), self.known) if turned else (self.known, _plain(other))
        return Value(getattr(operator, name)(*sides), self.layout)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "ge", "eq", "and_", "or_"):
    setattr(Value, f"__{_name.rstrip('_')}__", _operation(_name))
    setattr(Value, f"__r{_name.rstrip('_')}__", _operation(_name, turned=True))


class Number(int):
    """An integer that was loaded."""

    def to(self, dtype: Any) -> Number:
        return self

    def __add__(self, other: int) -> Number:
        return Number(int(self) + other)


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory = memory
        self.offset = offset

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=_DTYPES[self.memory.dtype])

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, more + self.offset)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return _DTYPES[self.data.dtype]

    def index(self, place: int) -> Shared:
        assert 0 <= place < len(self.data), "outside of what was allocated"
        return Shared(self.data[place])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.view(_TORCH[str(dtype)]).view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        self.data.copy_(value.known)


@dataclass
class Descriptor:
    """A tensor of which TMA copies blocks."""

    base: Tensor
    block: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return _DTYPES[self.base.dtype]

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(shape=self.block)

    @property
    def layout(self) -> None:
        return None

    def read(self, *place: int) -> Tensor:
        found = self.base.new_zeros(self.block)
        before = [max(-at, 0) for at in place]
        sides = list(zip(place, before, self.block, strict=True))
        part = self.base[tuple(slice(at + skip, max(at + size, 0)) for at, skip, size in sides)]
        found[tuple(slice(skip, skip + size) for skip, size in zip(before, part.shape, strict=True))] = part
        return found

    def write(self, place: list[int], numbers: Tensor) -> None:
        part = self.base[tuple(slice(at, at + size) for at, size in zip(place, self.block, strict=True))]
        part.copy_(numbers[tuple(slice(size) for size in part.shape)])


@dataclass
class Barrier:
    """An mbarrier: completes when `count` have arrived and no bytes are outstanding, and flips its phase."""

    changed: threading.Condition
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    copies: list[tuple[Shared, Tensor]] = field(default_factory=list)

    def arrive(self, expected: int = 0) -> None:
        with self.changed:
            assert self.pending > 0, "more arrivals than the barrier counts"
            self.pending -= 1
            self.bytes += expected
            self._complete()

    def _complete(self) -> None:
        if self.pending == self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, phase: int) -> None:
        def done() -> bool:
            for destination, numbers in self.copies:
                destination.data.copy_(numbers)
                self.bytes -= numbers.numel() * numbers.itemsize
            self.copies.clear()
            if self.bytes == 0 and self.pending == 0:
                self._complete()
            return self.phase != phase

        with self.changed:
            if not self.changed.wait_for(lambda: _local.failed() or done(), PATIENCE) or _local.failed():
                raise Deadlock(f"nobody completes phase {phase}")


class _Barriers:
    """Shared memory of barriers."""

    def __init__(self, number: int, changed: threading.Condition) -> None:
        self.shape = (number, 1)
        self._each = [Barrier(changed) for _ in range(number)]

    def index(self, place: int) -> Barrier:
        return self._each[place]


class _Mbarrier:
    class MBarrierLayout:
        pass

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    @staticmethod
    def expect(barrier: Barrier, number: int) -> None:
        barrier.arrive(number)

    @staticmethod
    def arrive(barrier: Barrier, count: int) -> None:
        barrier.arrive()

    @staticmethod
    def wait(barrier: Barrier, phase: int) -> None:
        barrier.wait(phase)


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(of: Descriptor, place: list[int], barrier: Barrier, destination: Shared) -> None:
        assert destination.shape == torch.Size(of.block), "the block has another shape"
        destination.data.fill_(math.nan if destination.data.is_floating_point() else 0x5A5A)
        with barrier.changed:
            barrier.copies.append((destination, of.read(*place)))
            barrier.changed.notify_all()

    @staticmethod
    def async_copy_shared_to_global(to: Descriptor, place: list[int], source: Shared) -> None:
        _local.stores.append(lambda: to.write(place, source.data))

    @staticmethod
    def store_wait(outstanding: int) -> None:
        while len(_local.stores) > outstanding:
            _local.stores.popleft()()


def _mma(a: Value | Shared, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
    assert is_async
    result = Value(None, acc.layout)

    def multiply() -> None:
        product = (a.data if isinstance(a, Shared) else a.known).float() @ b.data.float()
        result.data = acc.known + product if use_acc else product

    _local.products.append(multiply)
    return result


def _mma_wait(outstanding: int, deps: tuple[Value, ...]) -> Any:
    while len(_local.products) > outstanding:
        _local.products.popleft()()
    return deps if len(deps) > 1 else deps[0]


def _plain(value: Any) -> Any:
    return value.known if isinstance(value, Value) else value


def _paired(function: Any, one: Any, other: Any) -> Value:
    """Apply a function of two tensors, of which one may be a number."""
    known = torch.as_tensor(_plain(one)), torch.as_tensor(_plain(other))
    return Value(function(*known), next(each.layout for each in (one, other) if isinstance(each, Value)))


def _assemble(text: str, constraints: str, arguments: list[Value], dtype: Any, is_pure: bool, pack: int) -> Value:
    """Instructions on pairs of 16-bit numbers, each number on its own."""
    shape = torch.broadcast_shapes(*(each.shape for each in arguments))
    registers = {f"${1 + i}": each.known.expand(shape) for i, each in enumerate(arguments)}

    def number(name: str) -> Tensor:
        if name.startswith("0x"):
            return torch.full(shape, int(name, 16) & 0xFFFF, dtype=torch.int32).to(torch.int16)
        return registers[name]

    for line in filter(None, (part.strip() for part in text.strip("{} ").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *sources = (each.strip() for each in rest.split(","))
        if name == "shr.u32":
            registers[target] = ((number(sources[0]).int() & 0xFFFF) >> int(sources[1])).to(torch.int16)
        elif name == "lop3.b32":
            assert sources[3] == "0xea", "a and b, or c"
            registers[target] = number(sources[0]) & number(sources[1]) | number(sources[2])
        else:
            operation, kind = re.fullmatch(r"(sub|mul|fma)\.rn\.(bf16|f16)x2", name).groups()  # type: ignore[union-attr]
            real = torch.bfloat16 if kind == "bf16" else torch.float16
            # Of such numbers float64 has room for every product and sum that is meant to be exact.
            first, second, *third = (number(each).contiguous().view(real).double() for each in sources)
            exact = first - second if operation == "sub" else first * second + (third[0] if third else 0.0)
            registers[target] = exact.to(real).view(torch.int16)
    return Value(registers["$0"], arguments[0].layout)


class _Language:
    """Takes the place of `gluon.language` for one block."""

    def __init__(self, grid: tuple[int, int, int], changed: threading.Condition, num_warps: int) -> None:
        self._grid = grid
        self._changed = changed
        self._num_warps = num_warps

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *arguments: (name, *arguments)
        return getattr(gl, name)

    def num_warps(self) -> int:
        return self._num_warps

    def program_id(self, axis: int) -> int:
        return _local.block[axis]  # type: ignore[no-any-return]

    def num_programs(self, axis: int) -> int:
        return self._grid[axis]

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if str(dtype) == str(gl.int64):
            return _Barriers(shape[0], self._changed)
        return Shared(torch.zeros(shape, dtype=_TORCH[str(dtype)]))

    static_range = staticmethod(range)

    @staticmethod
    def arange(start: int, end: int, layout: Any) -> Value:
        return Value(torch.arange(start, end), layout)

    @staticmethod
    def exp(value: Value) -> Value:
        return Value(value.known.exp(), value.layout)

    @staticmethod
    def abs(value: Value) -> Value:
        return Value(value.known.abs(), value.layout)

    @staticmethod
    def exp2(value: Value) -> Value:
        return Value(value.known.exp2(), value.layout)

    @staticmethod
    def max(value: Value, axis: int) -> Value:
        return Value(value.known.amax(axis), value.layout)

    @staticmethod
    def sum(value: Value, axis: int) -> Value:
        return Value(value.known.sum(axis), value.layout)

    @staticmethod
    def maximum(one: Any, other: Any) -> Any:
        if isinstance(one, Value) or isinstance(other, Value):
            return _paired(torch.maximum, one, other)
        return max(one, other)

    @staticmethod
    def full(shape: list[int], value: float, dtype: Any, layout: Any) -> Value:
        return Value(torch.full(shape, value, dtype=_TORCH[str(dtype)]), layout)

    @classmethod
    def zeros(cls, shape: list[int], dtype: Any, layout: Any) -> Value:
        return cls.full(shape, 0, dtype, layout)

    @staticmethod
    def convert_layout(value: Value, layout: Any) -> Value:
        return Value(value.known, layout)

    @staticmethod
    def minimum(one: Any, other: Any) -> Any:
        if isinstance(one, Value) or isinstance(other, Value):
            return _paired(torch.minimum, one, other)
        return min(one, other)

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Any:
        if isinstance(condition, Value):
            return Value(torch.where(condition.known, _plain(one), _plain(other)))
        return one if condition else other

    inline_asm_elementwise = staticmethod(_assemble)

    @staticmethod
    def load(pointer: Pointer, mask: Value | None = None, other: float = 0, cache_modifier: str = "") -> Value | Number:
        places = _plain(pointer.offset)
        if isinstance(places, int):
            return Number(pointer.memory[places])
        if mask is None:
            return Value(pointer.memory[places])
        places, inside = torch.broadcast_tensors(places, mask.known)
        found = torch.full(places.shape, other, dtype=pointer.memory.dtype)
        found[inside] = pointer.memory[places[inside]]
        return Value(found)

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Value | None = None) -> None:
        places = _plain(pointer.offset)
        if mask is None:
            pointer.memory[places] = _plain(value)
        else:
            places, inside, numbers = torch.broadcast_tensors(places, mask.known, _plain(value))
            pointer.memory[places[inside]] = numbers[inside]

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        with self._changed:
            before = int(pointer.memory[pointer.offset])
            pointer.memory[pointer.offset] += value
            if value == 0 == before:
                # Somebody waits for a flag.
                self._changed.wait(0.02)
                if _local.failed():
                    raise Deadlock("nobody sets a flag")
            return before

    def atomic_xchg(self, pointer: Pointer, value: int, sem: str, scope: str) -> int:
        with self._changed:
            before = int(pointer.memory[pointer.offset])
            pointer.memory[pointer.offset] = value
            self._changed.notify_all()
            return before

    @staticmethod
    def warp_specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *options: Any) -> None:
        _local.spawn(partitions)


class _Namespaces:
    """The modules of a kernel, with what it calls replaced."""

    def __init__(self, language: _Language) -> None:
        self._replaced = {
            "gl": language,
            "mbarrier": _Mbarrier,
            "tma": _Tma,
            "warpgroup_mma": _mma,
            "warpgroup_mma_wait": _mma_wait,
            "fence_async_shared": lambda: None,
            "synchronize": lambda: None,
            "wait_for_producers": lambda gate: None,
            "release_consumers": lambda gate: None,
            "apply_gate": _apply_gate,
        }
        self._modules: dict[str, dict[str, Any]] = {}

    def python(self, kernel: Any) -> Callable[..., Any]:
        function = kernel.fn
        namespace = self._modules.get(function.__module__)
        if namespace is None:
            module = inspect.getmodule(function)
            namespace = self._modules[function.__module__] = dict(vars(module))
            for name, value in vars(module).items():
                if name in self._replaced:
                    namespace[name] = self._replaced[name]
                elif isinstance(value, gl.constexpr):
                    namespace[name] = value.value
                elif type(value).__name__ == "GluonJITFunction":
                    namespace[name] = self.python(value)
        return types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)


def _apply_gate(gate: Value, up: Value, dtype: Any, gelu: bool) -> Value:
    real = _TORCH[str(dtype)]
    return Value((torch.nn.functional.silu(gate.known).to(real).float() * up.known).to(real), gate.layout)


def run(kernel: Any, grid: tuple[int, int, int], *arguments: Any, num_warps: int, **constexprs: Any) -> None:
    """Run all blocks of a launch at once. `arguments`: a Descriptor, a tensor for a pointer, or a number.

    Raises Deadlock, or the first error of a block.
    """
    changed = threading.Condition()
    language = _Language(grid, changed, num_warps)
    function = _Namespaces(language).python(kernel)
    given = [Pointer(each.view(-1)) if isinstance(each, Tensor) else each for each in arguments]
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []

    def start(block: tuple[int, int, int], part: Callable[..., None], inputs: Any, named: dict[str, Any]) -> None:
        def body() -> None:
            _local.block, _local.products, _local.stores = block, deque(), deque()
            _local.failed = lambda: bool(errors)
            _local.spawn = lambda parts: [start(block, each, values, {}) for each, values in parts]
            try:
                with torch.inference_mode():
                    part(*inputs, **named)
                assert not _local.products, "products that nobody waits for"
                assert not _local.stores, "stores that nobody waits for"
            except BaseException as error:
                with changed:
                    errors.append(error)
                    changed.notify_all()

        thread = threading.Thread(target=body, daemon=True)
        threads.append(thread)
        thread.start()

    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                start((x, y, z), function, given, constexprs)
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise Deadlock("a block goes on")
