"""Plans, results and outcomes: the values that scheduler and executor exchange.

A plan contains changes. It names the members of the decode batch, which decode one token in every
step, only when they join and when they leave; an executor keeps them as its persistent batch. All
other tokens of a step are in `Chunk`s.

The values are named tuples, not frozen dataclasses. Both are immutable, but a named tuple takes a
third of the time to create, and creation was half of the cost of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.steptime import StepShape
    from goodput_engine.scheduler.request_table import ScheduledRequest  # noqa: TC004 - a cycle

__all__ = [
    "Admitted",
    "Chunk",
    "Copy",
    "Join",
    "Progress",
    "StepBuilder",
    "StepOutcome",
    "StepPlan",
    "StepResult",
]


class Admitted(NamedTuple):
    """A request that starts or resumes with this plan.

    Args:
        rid: the request.
        blocks: its complete block table, which replaces an earlier one.
        cached_tokens: leading tokens that are not computed, because the blocks hold them or a
            copy will fill them.
    """

    rid: int
    blocks: tuple[int, ...]
    cached_tokens: int


class Chunk(NamedTuple):
    """Tokens of one request outside the decode batch.

    Args:
        rid: the request.
        start: its tokens computed before, those in flight included.
        num_tokens: tokens to compute, at least 1.
        samples: True if they are its last ones, so that the step samples its next token.
        output_tokens: its output tokens before, those in flight included.
    """

    rid: int
    start: int
    num_tokens: int
    samples: bool
    output_tokens: int


class Join(NamedTuple):
    """A request that joins the decode batch; it decodes in every plan until it leaves.

    Args:
        rid: the request.
        start: its tokens computed before, those in flight included.
        output_tokens: its output tokens before, those in flight included.
    """

    rid: int
    start: int
    output_tokens: int


class Copy(NamedTuple):
    """KV blocks of one request to copy between device and host while the step computes.

    The step ends when computation and copies are done. A request whose blocks are copied computes
    nothing in the step, so copies depend only on earlier steps.

    Args:
        rid: the request.
        to_host: True for device to host, False for host to device.
        device_blocks, host_blocks: pairs of blocks to copy, at equal positions.
    """

    rid: int
    to_host: bool
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class StepPlan(NamedTuple):
    """One step. An executor applies the fields in their order.

    A plan with copies alone computes nothing.

    Args:
        plan_id: consecutive number.
        at_ns: time of planning.
        shape: shape of the step, from which a form predicts its duration.
        left: rids that left the decode batch since the previous plan.
        admitted: requests that start or resume, each with its block table.
        copies: blocks to copy while the step computes.
        joined: requests that join the decode batch.
        new_blocks: (rid, block) pairs to append to the block tables of members.
        decode_epoch: number of this plan among those that decode; 0 if it does not.
        num_decodes: members of the decode batch that decode in this plan.
        chunks: tokens of other requests to compute.
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
    """The result of a plan: one token for each request that sampled in it (docs/adr/0006).

    Args:
        plan_id: the plan.
        at_ns: end of the step.
        step_ns: device time of the step.
        stopped: finish reason ("stop") of each request that ended in this step.
    """

    plan_id: int
    at_ns: int
    step_ns: int
    stopped: Mapping[int, str]


class Progress(NamedTuple):
    """The first or last token of a request, or a token outside the decode batch.

    Args:
        request: the request; its `output_tokens` include the token.
        finish_reason: "stop" or "length" with the last token, else None.
    """

    request: ScheduledRequest
    finish_reason: str | None


class StepOutcome(NamedTuple):
    """The effect of a commit on requests.

    Args:
        plan: the committed plan.
        result: its result.
        advanced: rids of members of the decode batch that gained one token and continue.
        progress: first tokens, last tokens, and tokens of requests that left the decode batch.
        released: rids of removed requests, whose blocks are free.
    """

    plan: StepPlan
    result: StepResult
    advanced: list[int]
    progress: list[Progress]
    released: list[int]


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    """The next plan while the scheduler builds it.

    Args:
        plan_id: number of the plan.
        left: unused tokens of the budget.
        admitted, chunks, new_blocks: as in `StepPlan`.
        requests: requests of the chunks, in their order.
        last: requests whose last token is sampled in this plan.
        ended: chunks that sample a last token. Their requests do not run any more, but count in
            the width of the batch.
        decodes: members of the decode batch that decode in this plan.
        displaced: True if a request was evicted that may have a new block in this plan.
        tokens, context, squares, longest: sums over the chunks, as in `StepShape`.
        pending: blocks that commits will free, less those that requests of this plan wait for;
            None if not counted yet.
        owed: blocks that ready requests need and that admissions must leave free.
        starved: True if a running request found no free block, which prevents admissions.
    """

    plan_id: int
    left: int
    admitted: list[Admitted] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    requests: list[ScheduledRequest] = field(default_factory=list)
    last: list[ScheduledRequest] = field(default_factory=list)
    ended: int = 0
    decodes: int = 0
    displaced: bool = False
    tokens: int = 0
    context: int = 0
    squares: int = 0
    longest: int = 0
    pending: int | None = None
    owed: int = 0
    starved: bool = False
