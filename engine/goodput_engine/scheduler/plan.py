"""Plans, results and outcomes: the values that scheduler and executor exchange.

Members of the decode batch decode one token in every step. A plan names them only when they join
and when they leave; the executor stores the current members. All other tokens of a step are in
`Chunk`s.

The values are named tuples, not frozen dataclasses. Both are immutable, but a named tuple is
created in a third of the time, and creation was half of the cost of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.steptime import StepShape
    from goodput_engine.scheduler.request_table import ScheduledRequest  # noqa: TC004 - a cycle

__all__ = [
    "Admitted",
    "Chunk",
    "Copy",
    "InFlight",
    "Join",
    "Progress",
    "RequestFailure",
    "StepBuilder",
    "StepOutcome",
    "StepPlan",
    "StepResult",
]


class Admitted(NamedTuple):
    """A request that starts or resumes with this plan.

    Args:
        rid: the request.
        blocks: its complete block table, which replaces any earlier one.
        cached_tokens: leading tokens that are not computed, because the blocks hold them or a
            copy will fill them.
    """

    rid: int
    blocks: tuple[int, ...]
    cached_tokens: int


class Chunk(NamedTuple):
    """Tokens to compute for one request outside the decode batch.

    Args:
        rid: the request.
        start: number of its tokens computed before this step, those in flight included.
        num_tokens: number of tokens to compute, at least 1.
        samples: True if no tokens of the request remain to be computed afterwards, so that the
            step samples its next token.
        output_tokens: number of its output tokens before this step, those in flight included.
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
        start: number of its tokens computed before this step, those in flight included.
        output_tokens: number of its output tokens before this step, those in flight included.
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
        device_blocks, host_blocks: blocks to copy; equal positions form a pair.
    """

    rid: int
    to_host: bool
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class StepPlan(NamedTuple):
    """One step.

    An executor applies the fields from `left` to `chunks` in their order. A plan may consist of
    copies only.

    Args:
        plan_id: consecutive number.
        at_ns: time of planning.
        shape: shape of the step, from which a step-time form predicts its duration.
        left: rids that left the decode batch since the previous plan.
        admitted: requests that start or resume, each with its block table.
        copies: blocks to copy while the step computes.
        joined: requests that join the decode batch.
        new_blocks: (rid, block) pairs to append to the block tables of members.
        decode_epoch: consecutive number of this plan among the plans that decode; 0 if it does
            not decode.
        num_decodes: number of members of the decode batch that decode in this plan.
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


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one output token, by the model's own logits (docs/engine.md).

    Args:
        logprob: of the token itself.
        top_ids: ids of the most probable tokens, in descending order.
        top_logprobs: their log-probabilities.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class RequestFailure(NamedTuple):
    """The reason why a request cannot continue; see `Rejected` in `goodput_engine.messages`."""

    reason: str
    detail: str
    retry_after_s: int = 0


class StepResult(NamedTuple):
    """The result of a plan: one token for each request that sampled in it (docs/adr/0006).

    Args:
        plan_id: the plan.
        at_ns: end of the step.
        step_ns: device time of the step.
        stopped: finish reason ("stop") of each request that ended in this step.
        token_ids: id of the token of each request that sampled; empty on an emulated device. The
            scheduler does not read them.
        logprobs: log-probabilities of the tokens of requests with this option. The scheduler does
            not read them.
        failed: requests that cannot continue. Their tokens are missing.
    """

    plan_id: int
    at_ns: int
    step_ns: int
    stopped: Mapping[int, str]
    token_ids: Mapping[int, int] = MappingProxyType({})
    logprobs: Mapping[int, TokenLogprobs] = MappingProxyType({})
    failed: Mapping[int, RequestFailure] = MappingProxyType({})


class Progress(NamedTuple):
    """The first or last token of a request, or a token outside the decode batch.

    Args:
        request: the request; its `output_tokens` include the token.
        finish_reason: "stop" or "length" for the last token, else None.
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
        left: tokens of the budget that are not scheduled yet.
        admitted, chunks, new_blocks: as in `StepPlan`.
        requests: the requests of the chunks, in the order of the chunks.
        last: requests whose last token is sampled in this plan.
        ended: number of chunks that sample a last token. Their requests no longer run, but still
            count in the batch width of this plan.
        decodes: number of members of the decode batch that decode in this plan.
        displaced: True if requests were evicted; these may have new blocks in this plan.
        pending: number of blocks that commits will free, less those that requests of this plan
            wait for; None if not counted yet.
        owed: number of blocks that ready requests need and that admissions must leave free.
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
    pending: int | None = None
    owed: int = 0
    starved: bool = False


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that has not been committed, and the requests that its commit affects.

    Args:
        plan: the plan that the scheduler returned.
        requests: the requests of its chunks, in the order of the chunks.
        copied: requests whose copy ends with this plan.
    """

    plan: StepPlan
    requests: list[ScheduledRequest]
    copied: Sequence[ScheduledRequest] = ()
    leavers: list[ScheduledRequest] = field(default_factory=list)
    """Requests that decode in this plan and left the batch afterwards."""
    releases: list[ScheduledRequest] = field(default_factory=list)
    """Requests whose blocks no later plan uses, and which its commit releases."""
