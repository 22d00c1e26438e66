"""What goes into a replay and what comes out of it, between the command and the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.errors import AbortedRun, Interrupted
from goodput_replay.arguments import ReplayOptions
from goodput_replay.plan import Plan, PlanStats
from goodput_replay.run.facts import Promise, TraceFacts
from goodput_replay.run.summary import Summary

__all__ = ["Finished", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that is decided before the event loop starts.

    Args:
        options: as asked for.
        plan: what is sent.
        stats: what the plan amounts to.
        trace: what the report says of the trace.
        promise: what requests are judged by.
        headers: of every request; the key is among them.
        salt: of the prompts.
        service: the manifest's name; empty for a bare target.
        command: the command line without secrets.
    """

    options: ReplayOptions
    plan: Plan
    stats: PlanStats
    trace: TraceFacts
    promise: Promise
    headers: dict[str, str]
    salt: str
    service: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run whose folder is complete.

    Args:
        summary: of what was recorded.
        ended_by: why it ended before its last answer; None: it did not.
    """

    summary: Summary
    ended_by: AbortedRun | Interrupted | None = None
