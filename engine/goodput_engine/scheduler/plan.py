"""What the scheduler decides and what comes back: the values between it and an executor.

A plan tells what changes. The requests that decode one token in every step, the *cohort*, are
named when they join and when they leave, not in each plan; an executor keeps them as its
persistent batch. Everything else that a step computes is a `Chunk`.

Named tuples, not frozen dataclasses: as immutable, and made in a third of the time. Making these
was half of what a step costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.steptime import StepShape
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Admitted", "Chunk", "Copy", "Join", "Progress", "StepOutcome", "StepPlan", "StepResult"]


class Admitted(NamedTuple):
    """A request that this plan takes in, anew or again after a preemption.

    Args:
        rid: the request.
        blocks: its whole block table; an earlier one is void.
        cached_tokens: leading tokens that are already computed: found in those blocks, or about
            to be copied into them.
    """

    rid: int
    blocks: tuple[int, ...]
    cached_tokens: int


class Chunk(NamedTuple):
    """Some tokens of one request outside the cohort.

    Args:
        rid: the request.
        start: tokens of it computed before, those in flight included.
        num_tokens: tokens to compute now, at least 1.
        samples: whether they reach its end, so that the step gives it a token.
        output_tokens: output tokens it had before, those in flight included.
    """

    rid: int
    start: int
    num_tokens: int
    samples: bool
    output_tokens: int


class Join(NamedTuple):
    """A request that decodes one token in this and every later decoding plan, until it leaves.

    Args:
        rid: the request.
        start: tokens of it computed before, those in flight included.
        output_tokens: output tokens it had before, those in flight included.
    """

    rid: int
    start: int
    output_tokens: int


class Copy(NamedTuple):
    """KV blocks of one request to copy between device and host while the step computes.

    The step ends when both are done. A request whose blocks are copied computes nothing in it,
    so copies wait for earlier steps, never for this one.

    Args:
        rid: the request.
        to_host: the direction.
        device_blocks, host_blocks: pairwise source and destination, or the reverse.
    """

    rid: int
    to_host: bool
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class StepPlan(NamedTuple):
    """One step. An executor applies it in the order of the fields.

    A plan may hold copies alone; it computes nothing then.

    Args:
        plan_id: counts up by one.
        at_ns: when it was planned.
        shape: the sums that predict how long it takes.
        left: rids that left the cohort since the plan before.
        admitted: requests taken in, each with its block table.
        copies: blocks to copy while the step computes.
        joined: requests that join the cohort.
        new_blocks: (rid, block) to append to the tables of members of the cohort.
        decode_epoch: counts the plans in which the cohort decodes; 0: not in this one.
        num_decodes: members of the cohort that decode now.
        chunks: what else is computed.
    """

    plan_id: int
    at_ns: int
    shape: StepShape
    left: tuple[int, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    copies: tuple[Copy, ...] = ()
    joined: tuple[Join, ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()
    decode_epoch: int = 0
    num_decodes: int = 0
    chunks: tuple[Chunk, ...] = ()


class StepResult(NamedTuple):
    """What a plan's execution gave: one token to each request that sampled in it (docs/adr/0006).

    Args:
        plan_id: of the plan.
        at_ns: when it was done.
        step_ns: device time it took.
        stopped: of the requests that ended by themselves with this token, why ("stop").
    """

    plan_id: int
    at_ns: int
    step_ns: int
    stopped: Mapping[int, str]


class Progress(NamedTuple):
    """A token that is more than one more in the cohort's round.

    Args:
        request: whose; `output_tokens` counts this one.
        finish_reason: "stop" or "length" with its last token, else None.
    """

    request: ScheduledRequest
    finish_reason: str | None


class StepOutcome(NamedTuple):
    """What a commit gave to whom.

    Args:
        plan: what was computed.
        result: how it came out.
        advanced: rids that gained one token and go on; nothing else is to be told of them.
        progress: everyone else who gained a token: first tokens, last ones, tokens of requests
            that have left the cohort since.
        released: rids that are gone for good, their blocks free.
    """

    plan: StepPlan
    result: StepResult
    advanced: list[int]
    progress: list[Progress]
    released: list[int]
