"""Quality-of-service files and a fake clock, for tests of the order of requests."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.engine.schedule.quality_of_service import Policy

__all__ = ["GROUPS", "Clock", "policy", "policy_of"]

GROUPS: dict[str, dict[str, float]] = {
    "Gold": {"boss": 100},
    "Silver": {"ann": 60, "bob": 30, "default": 10},
    "Bronze": {"zoe": 100, "idle": 0},
}


class Clock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def policy(groups: dict[str, dict[str, float]], **fields: Any) -> dict[str, Any]:
    """What the file holds: group -> user -> quota, and `fields` in place of its own."""
    members = {
        name: [{"id": user, "quota_pct": quota} for user, quota in users.items()] for name, users in groups.items()
    }
    return {"enable_user_qos": True, "user_groups": list(groups), "user_group_map": members, **fields}


def policy_of(groups: dict[str, dict[str, float]]) -> Policy:
    """The same, read."""
    return msgspec.convert(policy(groups), Policy)
