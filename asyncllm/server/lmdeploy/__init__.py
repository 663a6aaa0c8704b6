"""LMDeploy's own routes, and vLLM's tokenization routes."""
