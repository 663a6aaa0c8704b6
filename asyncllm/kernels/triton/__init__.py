"""Triton launchers, named by `kernels.dispatch.op`. One file per op; the torch reference is in `asyncllm.kernels`."""
