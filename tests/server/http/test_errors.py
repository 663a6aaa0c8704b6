"""What clients are told of errors that are not theirs."""

from __future__ import annotations

from asyncllm.errors import InvalidCheckpoint
from asyncllm.server.http.errors import as_api_error


def test_paths_of_the_server_are_for_its_log() -> None:
    error = as_api_error(InvalidCheckpoint("/models/secret/config.json is not a JSON object. Download it again."))
    assert (error.status, error.code) == (503, "model_unavailable")
    assert "/models" not in error.message
