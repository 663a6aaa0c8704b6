"""What clients are told of errors that are not theirs."""

from __future__ import annotations

import pytest
from aiohttp import web

from asyncllm.errors import InvalidCheckpoint
from asyncllm.server.http.errors import as_api_error, no_route


def test_paths_of_the_server_are_for_its_log() -> None:
    error = as_api_error(InvalidCheckpoint("/models/secret/config.json is not a JSON object. Download it again."))
    assert (error.status, error.code) == (503, "model_unavailable")
    assert "/models" not in error.message


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/files/abc/content", "asyncllm batch"),
        ("/v1/messages/batches", "No batches"),
        ("/nodes/status", "serve proxy"),
        ("/docs", "page at /"),
        ("/files", "GET / lists them"),
        ("/v1/nodes", "GET / lists them"),
    ],
)
def test_routes_of_other_servers_are_told_what_to_do_instead(path: str, says: str) -> None:
    assert says in no_route(path, web.HTTPNotFound()).message
