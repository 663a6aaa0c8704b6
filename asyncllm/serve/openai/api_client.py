"""LMDeploy's place of the client, so that programs written for it find it."""

from __future__ import annotations

from asyncllm.server.client import APIClient

__all__ = ["APIClient"]
