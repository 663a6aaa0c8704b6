"""LMDeploy's place of its request distributor."""
