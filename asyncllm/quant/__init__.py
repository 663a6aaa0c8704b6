"""Quantized weights: one file per scheme, which reads the checkpoint's settings and assigns layers their method.

A scheme is selected by its name in config.json, and chooses a `LinearMethod` for each module from the module's tensors
in the files; modules stored unquantized keep the plain method. During loading, methods convert every file format to one
of a few layouts, which the ops in `asyncllm.kernels` read. Models do not depend on schemes.
"""
