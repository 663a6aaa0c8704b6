"""Compile kernels for sm_90 on a machine without a GPU, and say what came out.

Kernels decorated under TRITON_INTERPRET=1 cannot be compiled, so the tests run this file as a process of its own, one
for all of them: it reads names of modules of tests.kernels, compiles their `CASES`, and answers each by a JSON list.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_SHARED_BYTES = 232_448
"""Shared memory that one block may have on Hopper."""


@dataclass(frozen=True)
class Case:
    """One configuration of a kernel. `signature` gives the Triton type of each argument that is not a constexpr, such
    as "*bf16" or "i32"; pointers count as divisible by 16."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of a case, per thread or per block."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    async_copies: int


def compile_case(case: Case) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = case.kernel.arg_names
    missing = set(names) - set(case.signature) - set(case.constexprs)
    assert not missing, f"{case.name}: no type given for {sorted(missing)}"
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    divisible = [
        index
        for index, name in enumerate(names)
        if name not in case.constexprs and case.signature[name].startswith("*")
    ]
    source = (GluonASTSource if isinstance(case.kernel, GluonJITFunction) else ASTSource)(
        fn=case.kernel,
        signature=signature,
        constexprs=case.constexprs,
        attrs={(index,): [["tt.divisibility", 16]] for index in divisible},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack, local = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return Compiled(
        name=case.name,
        registers=registers,
        spilled_bytes=stack + local,
        shared_bytes=kernel.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        async_copies=ptx.count("cp.async.c"),
    )


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack and local memory of the one kernel in `cubin`, as cuobjdump reports them."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2]), int(found[3])


Compile = Callable[[str], dict[str, Compiled]]
"""The name of a module of this folder -> its compiled `CASES`, by name."""


@contextmanager
def compiler() -> Iterator[Compile]:
    """Start the process that compiles, and give the function that asks it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.offline"]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        @functools.cache
        def compile_module(module: str) -> dict[str, Compiled]:
            print(module, file=questions, flush=True)
            of, found = "", None
            while of != module:  # a test whose time was over has left its answer
                of, found = json.loads(answers.readline())
            assert isinstance(found, list), f"{module} does not compile:\n{found}"
            return {entry["name"]: Compiled(**entry) for entry in found}

        yield compile_module


def _compiled(module: str) -> list[dict[str, Any]] | str:
    """Return what was compiled, or what went wrong."""
    try:
        cases = importlib.import_module(f"tests.kernels.{module}").CASES
        return [dataclasses.asdict(compile_case(case)) for case in cases]
    except Exception:
        return traceback.format_exc()


def main() -> None:
    """Answer each line, the name of a module, by a line."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed as modules compile is no answer
    for line in sys.stdin:
        module = line.strip()
        print(json.dumps([module, _compiled(module)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
