"""Servers from outside: the command `asyncllm serve`, and LMDeploy's places of the client."""
