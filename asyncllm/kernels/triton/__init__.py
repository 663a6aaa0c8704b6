"""Triton launchers, named by `kernels.dispatch.op`; their torch references are in `asyncllm.kernels`.

A jitted function that is launched is called `<what>_kernel`; the others are parts of kernels. `language` has what all
kernels use, `launch` how they are launched.
"""
