"""LMDeploy's place of `serve` and `client`, so that programs written for it find them."""

from __future__ import annotations

from asyncllm.http_client import client, serve

__all__ = ["client", "serve"]
