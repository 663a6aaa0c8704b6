"""The modules of bench/ import each other by plain names, as scripts of one folder do; tests find them imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

FOLDER = str(Path(__file__).parent.parent.parent / "bench")
MODULES = (
    "workloads",
    "engines",
    "table",
    "dense_shapes",
    "vision_shapes",
    "limits",
    "throughput",
    "step_profile",
    "latency",
    "images",
    "grammars",
    "cpu",
    "kernel_timing",
    "roofline",
    "swap",
    "rank_sums",
    "adapters",
    "streams",
    "serve",
    "overload",
    "soak_requests",
    "soak_books",
    "soak_client",
    "soak_server",
    "soak",
)

# The folder does not stay on the path: it has a kernels.py, which transformers would take for another library.
sys.path.insert(0, FOLDER)
for module in MODULES:
    import_module(module)
sys.path.remove(FOLDER)
