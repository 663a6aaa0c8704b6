"""LMDeploy's place of the client, so that programs written for it find it."""

from __future__ import annotations

from collections.abc import Mapping

from asyncllm.http_client.api_client import APIClient

__all__ = ["APIClient", "get_model_list"]


def get_model_list(api_url: str, headers: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the models that a server lists.

    `api_url`: the list's address, which ends in /v1/models. `headers`: the key, as "Authorization". Raises as APIClient
    does.
    """
    fields = {name.lower(): value for name, value in (headers or {}).items()}
    key = fields.get("authorization", "").removeprefix("Bearer ") or None
    with APIClient(api_url.rstrip("/").removesuffix("/models"), key) as client:
        return client.available_models
