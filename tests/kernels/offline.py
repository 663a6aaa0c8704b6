"""Compile kernels for sm_90 on a machine without a GPU, and say what came out.

Kernels decorated under TRITON_INTERPRET=1 cannot be compiled, so the tests run this file as a process of its own:
`python -m tests.kernels.offline MODULE` compiles `CASES` of the module tests.kernels.MODULE and prints a JSON list.
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


@functools.cache
def compiled(module: str) -> dict[str, Compiled]:
    """The compiled `CASES` of tests.kernels.<module>, by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.offline", module],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {entry["name"]: Compiled(**entry) for entry in json.loads(result.stdout.splitlines()[-1])}


def main() -> None:
    cases = importlib.import_module(f"tests.kernels.{sys.argv[1]}").CASES
    print(json.dumps([dataclasses.asdict(compile_case(case)) for case in cases]))


if __name__ == "__main__":
    main()
