"""Quality of service: chooses the next user to serve, from a file of user groups and quotas in LMDeploy's format.

    {"enable_user_qos": true,
     "user_groups": ["Gold", "Silver"],
     "user_group_map": {"Gold":   [{"id": "alice", "quota_pct": 100}],
                        "Silver": [{"id": "bob", "quota_pct": 30}, {"id": "default", "quota_pct": 70}]}}

Groups are served in the order of `user_groups`: while a user of the first group waits, no user of another is admitted.
Within a group, the next user is the waiting one with the least use in proportion to the quota; users with quota 0 come
last. Use covers the last `WINDOW_S` seconds: prompt tokens that had to be computed at admission, and generated tokens.
Tokens recomputed after a preemption are not charged to any user.

"default" stands for all users that the file does not list. If several groups list it, the highest quota counts, because
only the user id determines a request's group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Annotated

import msgspec
from msgspec import Meta

from asyncllm.errors import InvalidParameter, short

__all__ = ["DEFAULT_USER", "WINDOW_S", "Policy", "QualityOfService", "User"]

DEFAULT_USER = "default"
WINDOW_S = 60.0
BUCKET_S = 5.0
"""Length of a bucket in seconds; use is forgotten bucket by bucket."""
QUOTA_TOLERANCE = 0.1
"""How far in percent the quotas of a group may miss 100: thirds are not decimal fractions."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's entry in a group."""

    id: Annotated[str, Meta(min_length=1)]
    quota_pct: Annotated[float, Meta(ge=0, le=100)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    enable_user_qos: bool
    user_groups: Annotated[list[str], Meta(min_length=1)]
    user_group_map: dict[str, list[Member]]

    def complaint(self) -> str | None:
        """Return a description of a contradiction between fields, or None."""
        groups = self.user_groups
        if len(set(groups)) < len(groups):
            return "user_groups names a group twice"
        for name in (*groups, *self.user_group_map):
            if (name in groups) != (name in self.user_group_map):
                where = ("user_groups", "user_group_map")
                found, missing = where if name in groups else where[::-1]
                return f"{found} has the group {short(name)}, and {missing} does not"
        seen: set[str] = set()
        for name in groups:
            members = self.user_group_map[name]
            for member in members:
                if member.id in seen:
                    return f"the user {short(member.id)} is listed twice; a user belongs to one group"
                seen.add(member.id)
            seen.discard(DEFAULT_USER)
            total = sum(member.quota_pct for member in members)
            if abs(total - 100) > QUOTA_TOLERANCE:
                return f"the quotas of the group {short(name)} add up to {total:g}, not to 100"
        return None


class User:
    """A user with a quota. Written by QualityOfService and, token by token, by the waiting queue."""

    __slots__ = (
        "_before",
        "_buckets",
        "current",
        "group",
        "id",
        "listed",
        "num_waiting",
        "number",
        "queued_requests",
        "queued_tokens",
        "quota",
    )

    def __init__(self, id: str, number: int, group: int, quota: float) -> None:
        self.id = id
        self.number = number
        """Unique: the user's position in the file."""
        self.group = group
        """Number of the group; 0 is served first."""
        self.quota = quota
        self.num_waiting = 0
        """Waiting sequences."""
        self.queued_requests = 0
        """Requests whose first sequence waits. Written by the waiting queue, like the next field."""
        self.queued_tokens = 0
        """Known tokens of the waiting sequences."""
        self.listed = False
        """Whether the group's heap has an entry for this user."""
        self.current = 0
        """Tokens used in the current time bucket."""
        self._before = 0
        """Tokens used in earlier buckets."""
        self._buckets: deque[tuple[int, int]] = deque()
        """(bucket, its tokens), oldest first."""

    @property
    def used(self) -> int:
        """Tokens used within the window."""
        return self._before + self.current

    @property
    def load(self) -> tuple[bool, float]:
        """Use in proportion to the quota; the user with the lowest value is next."""
        return (False, self.used / self.quota) if self.quota else (True, float(self.used))

    def close_bucket(self, bucket: int, forget: int) -> None:
        """End the current bucket, and forget buckets up to `forget`."""
        if self.current:
            self._buckets.append((bucket, self.current))
            self._before += self.current
            self.current = 0
        while self._buckets and self._buckets[0][0] <= forget:
            self._before -= self._buckets.popleft()[1]


class QualityOfService:
    """Users and their use of the engine. Written by the waiting queue only."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self.enabled = policy.enable_user_qos
        self._clock = clock
        self._bucket = int(clock() / BUCKET_S)
        self.users: dict[str, User] = {}
        numbers = count()
        for group, name in enumerate(policy.user_groups):
            for member in policy.user_group_map[name]:
                listed_before = self.users.get(member.id)
                if listed_before is None or listed_before.quota < member.quota_pct:
                    self.users[member.id] = User(member.id, next(numbers), group, member.quota_pct)
        self._heaps: list[list[tuple[tuple[bool, float], int, User]]] = [[] for _ in policy.user_groups]
        """Per group, an entry for each waiting user. An entry may be outdated: loads rise until a bucket is forgotten,
        so it is corrected when it reaches the top. Users who no longer wait are dropped then."""

    @classmethod
    def open(cls, path: str, clock: Callable[[], float] = time.monotonic) -> QualityOfService:
        """Read the file. Raises InvalidParameter if it cannot be read or contradicts itself."""
        try:
            with open(path, "rb") as file:
                policy = msgspec.json.decode(file.read(), type=Policy)
        except OSError as error:
            raise InvalidParameter(
                f"Cannot read qos_config_path={path!r} ({type(error).__name__}). Give the path of a JSON file.",
                "qos_config_path",
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidParameter(
                f"qos_config_path={path!r} is not a QoS configuration: {error}. It needs enable_user_qos, user_groups "
                f"and user_group_map.",
                "qos_config_path",
            ) from None
        complaint = policy.complaint()
        if complaint is not None:
            raise InvalidParameter(
                f"qos_config_path={path!r} contradicts itself: {complaint}. Correct the file.", "qos_config_path"
            )
        return cls(policy, clock)

    def find(self, user_id: str | None) -> User | None:
        """Return the user with this id, or "default"; None without quality of service. Raises InvalidParameter."""
        if not self.enabled:
            return None
        user = self.users.get(user_id or DEFAULT_USER) or self.users.get(DEFAULT_USER)
        if user is None:
            known = f"user_id={short(user_id)} is not in the QoS file" if user_id else "The request has no user_id"
            raise InvalidParameter(
                f"{known}, and the file has no user {DEFAULT_USER!r} for all others. Pass the id of a listed user.",
                "user_id",
            )
        return user

    def sequence_waits(self, user: User) -> None:
        """Count one more of the user's sequences as waiting."""
        user.num_waiting += 1
        if not user.listed:
            user.listed = True
            heappush(self._heaps[user.group], (user.load, user.number, user))

    def sequence_left(self, user: User) -> None:
        """Count one less of the user's sequences as waiting."""
        user.num_waiting -= 1

    def next_user(self) -> User:
        """Return the waiting user to serve next. At least one waits."""
        self.expire_use()
        for heap in self._heaps:
            while heap:
                load, _, user = heap[0]
                if not user.num_waiting:
                    heappop(heap)
                    user.listed = False
                elif load != user.load:
                    heapreplace(heap, (user.load, user.number, user))
                else:
                    return user
        raise AssertionError("no user waits")

    def expire_use(self) -> None:
        """Forget use older than the window."""
        bucket = int(self._clock() / BUCKET_S)
        if bucket == self._bucket:
            return
        for user in self.users.values():
            user.close_bucket(self._bucket, bucket - int(WINDOW_S / BUCKET_S))
        self._bucket = bucket
        for heap in self._heaps:
            heap[:] = [(user.load, user.number, user) for _, _, user in heap]
            heapify(heap)

    def used(self) -> dict[str, int]:
        """Return user id -> tokens used within the window."""
        self.expire_use()
        return {user.id: user.used for user in self.users.values()} if self.enabled else {}
