"""LMDeploy's request distributor, `asyncllm serve proxy`: one address in front of several servers. Loads no model."""
