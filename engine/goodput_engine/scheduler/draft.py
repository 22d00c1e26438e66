"""A plan while it is being made, and while it is under way: the scheduler's own working memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.plan import Chunk

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import Admitted, StepPlan
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Draft", "InFlight"]


class Draft:
    """What the next plan holds so far.

    Args:
        plan_id: its number.
        left: tokens of the budget that are not given out.
    """

    __slots__ = (
        "admitted",
        "chunks",
        "context",
        "decodes",
        "displaced",
        "ended",
        "last",
        "left",
        "longest",
        "new_blocks",
        "owed",
        "plan_id",
        "promised",
        "requests",
        "squares",
        "starved",
        "tokens",
    )

    def __init__(self, *, plan_id: int, left: int) -> None:
        self.plan_id = plan_id
        self.left = left
        self.admitted: list[Admitted] = []
        self.chunks: list[Chunk] = []
        self.requests: list[ScheduledRequest] = []
        """Of the chunks, in their order."""
        self.new_blocks: list[tuple[int, int]] = []
        self.last: list[ScheduledRequest] = []
        """Requests whose last token this plan samples."""
        self.ended = 0
        """Chunks that sample a last token: no longer running, yet part of this step's width."""
        self.decodes = 0
        """Members of the cohort that decode in it."""
        self.displaced = False
        """Somebody was evicted who may have got a block in this plan already."""
        self.tokens = 0
        self.context = 0
        self.squares = 0
        self.longest = 0
        self.promised: int | None = None
        """Blocks that commits will free and nobody in this plan waits for; None: not counted."""
        self.owed = 0
        """Blocks that requests need which were running before and have not got one yet."""
        self.starved = False
        """A running request found no block: nobody new may start in this plan."""

    @property
    def empty(self) -> bool:
        """Whether it computes nothing and takes nobody in."""
        return not (self.decodes or self.chunks or self.admitted)

    def add(self, request: ScheduledRequest, tokens: int, total: int) -> bool:
        """A chunk of a request outside the cohort; returns whether it reaches its end."""
        start = request.base_planned
        end = start + tokens
        samples = end == total
        self.chunks.append(
            Chunk(
                rid=request.rid,
                start=start,
                num_tokens=tokens,
                samples=samples,
                output_tokens=request.base_sampled,
            )
        )
        self.requests.append(request)
        self.tokens += tokens
        self.left -= tokens
        self.context += end
        self.squares += end * end - start * start
        self.longest = max(self.longest, tokens)
        request.base_planned = end
        request.last_plan = self.plan_id
        return samples


class InFlight:
    """A plan under way.

    Args:
        plan: it.
        requests: of its chunks, in their order.
    """

    __slots__ = ("copied", "leavers", "plan", "releases", "requests")

    def __init__(self, plan: StepPlan, requests: list[ScheduledRequest]) -> None:
        self.plan = plan
        self.requests = requests
        self.leavers: list[ScheduledRequest] = []
        """Requests that decode in this plan as members and have left the cohort since."""
        self.copied: list[ScheduledRequest] = []
        """Requests whose last blocks are copied in this plan."""
        self.releases: list[ScheduledRequest] = []
        """Requests whose blocks this plan is the last to use."""
