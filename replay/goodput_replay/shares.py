"""Divide a plan among several senders: processes of one machine, and shards on several machines.

A session belongs to one share, so that one client sends its requests, in order. The share is a
function of the session's id alone, or with causal sessions of the first request among the sessions
that follow each other. Each sender therefore finds its own requests in the trace, and no list of
requests has to be exchanged.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ENV_COMPLETION_INDEX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_replay.plan import PlannedRequest

__all__ = ["ALL", "MAX_SHARDS", "Share", "digest_of", "parse_shard"]

MAX_SHARDS: Final = 1000
_SHARD: Final = re.compile(r"(\d{1,4})/(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of `count` shares of a plan.

    Args:
        index: number of the share, from 0.
        count: number of shares, at least 1.
    """

    index: int
    count: int

    def holds(self, request: PlannedRequest) -> bool:
        """True if a request belongs to this share."""
        return self.count == 1 or digest_of(request) % self.count == self.index

    def part(self, index: int, count: int) -> Share:
        """Return one of `count` parts of this share; together they have all of its requests."""
        return Share(index=self.index + self.count * index, count=self.count * count)


ALL: Final = Share(index=0, count=1)
"""The complete plan."""


def digest_of(request: PlannedRequest) -> int:
    """Return 64 bits of a digest of a request's session, or of its id if it has no session."""
    key = request.session_id or request.request_id
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> Share:
    """Parse a shard such as `2/4`, the second of four, or `job/4`.

    Args:
        text: the shard; `job` stands for the pod's number in an Indexed Job.
        environment: environment of the process, with the variable that Kubernetes sets.

    Raises:
        ValueError: the text is not a shard, or there are too many of them.
    """
    if text.startswith("job/"):
        index = environment.get(ENV_COMPLETION_INDEX, "")
        if not re.fullmatch(r"\d{1,3}", index, re.ASCII):
            raise ValueError(
                f"{text!r} needs {ENV_COMPLETION_INDEX}, which Kubernetes sets in the pods of an "
                "Indexed Job; write i/n elsewhere"
            )
        text = f"{int(index) + 1}/{text.removeprefix('job/')}"
    match = _SHARD.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_SHARDS:
        raise ValueError(
            f"{text!r} is not a shard; write i/n, such as 2/4 for the second of four; at most "
            f"{MAX_SHARDS} shards"
        )
    return Share(index=int(match[1]) - 1, count=int(match[2]))
