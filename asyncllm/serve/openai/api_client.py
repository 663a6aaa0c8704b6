"""LMDeploy's place of the client, so that programs written for it find it."""

from __future__ import annotations

from asyncllm.http_client.api_client import APIClient

__all__ = ["APIClient"]
