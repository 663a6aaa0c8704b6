"""Quantized weights: one file for each scheme, which reads the checkpoint's settings and gives layers their method.

A scheme is found by the name that config.json has for it, and chooses a `LinearMethod` for each module by the tensors
that the files hold of it: what is stored plainly is left as it is. The methods bring every file format to one of few
layouts as it is loaded, and the ops in `asyncllm.kernels` know these alone. Models do not know of schemes.
"""
