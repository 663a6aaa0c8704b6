"""What a streamed token costs: our side of the measurement, in one process."""

from __future__ import annotations

import argparse

import pytest
import streams


@pytest.mark.anyio
async def test_every_stream_is_read_whole_and_its_gaps_are_told() -> None:
    arguments = argparse.Namespace(streams=3, tokens=8, step_ms=5.0)
    async with streams.ours(arguments) as port:
        gaps = await streams.read_streams(port, arguments)
    assert gaps
    assert all(-0.005 <= gap < 1 for gap in gaps)
