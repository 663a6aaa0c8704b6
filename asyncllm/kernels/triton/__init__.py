"""Triton launchers, named by `kernels.dispatch.op`; their torch references are in `asyncllm.kernels`.

A jitted function that is launched is named `<what>_kernel`; other jitted functions are parts of kernels. `language` has
what all kernels use, and `launch` launches them.
"""
