"""What the tests of the agents share."""

from __future__ import annotations

import pytest

from tests.agent.tiny_model import MakeAgent, tiny_agent, tiny_device_agent


@pytest.fixture(params=[tiny_agent, tiny_device_agent], ids=["ModelAgent", "DeviceAgent"])
def make_agent(request: pytest.FixtureRequest) -> MakeAgent:
    """Both agents run the same steps, so they pass the same tests."""
    make: MakeAgent = request.param
    return make
