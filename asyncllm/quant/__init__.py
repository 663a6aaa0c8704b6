"""Quantized weights: one file for each scheme, which reads the checkpoint's settings and gives layers their method.

A scheme is found by its name in config.json, and chooses a `LinearMethod` for each module by the module's tensors in
the files; modules that are stored plainly keep the plain method. While loading, methods convert every file format to
one of a few layouts, which the ops in `asyncllm.kernels` take. Models know nothing of schemes.
"""
