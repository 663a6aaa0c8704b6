"""LMDeploy's own routes, and vLLM's for tokens."""
