"""LMDeploy's place of its client."""
