"""What the scheduler knows of one request: the only mutable state of its life in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from goodput_core.slo.targets import Targets

__all__ = ["Epochs", "RequestState", "ScheduledRequest"]


class Epochs(Protocol):
    """The cohort, as its members count by it."""

    epoch: int
    """Steps in which the cohort has decoded, those in flight included."""
    committed_epoch: int
    """Of these, how many have committed."""


class RequestState(Enum):
    """Where a request is; each state has one owner in the scheduler."""

    WAITING = auto()
    """In the queue, holding no blocks but perhaps a copy in host memory."""
    PREFILLING = auto()
    """Admitted, and more than one step from its next token."""
    READY = auto()
    """One token behind, to decode with the cohort as soon as budget and blocks allow."""
    DECODING = auto()
    """A member of the cohort: one token in every step that decodes."""
    FINISHING = auto()
    """Its last token is in flight."""
    PREEMPTING = auto()
    """Evicted; gives up its blocks when the last step that uses them commits."""
    LEAVING = auto()
    """Evicted; its blocks are being copied to host memory."""
    RETURNING = auto()
    """Admitted; its blocks are being copied back from host memory."""
    ARRIVING = auto()
    """Taken over from another replica; its blocks are being filled."""
    DEPARTING = auto()
    """It goes on elsewhere; `KEPT` when the last step that uses its blocks commits."""
    KEPT = auto()
    """It is over here, and its blocks are kept until another replica has them."""
    FINISHED = auto()
    CANCELLED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest:
    """One request, owned by the scheduler.

    The properties are right in every state. The `base_` counters alone are right outside the
    cohort; a member's tokens since its joining are counted by the cohort's epochs.

    Args:
        rid: never reused within a process.
        arrival_ns: when it came.
        input_tokens: tokens of its prompt.
        max_output_tokens: the client's bound; None: the model's limit.
        block_hashes: chained hashes of the prompt's full blocks. Blocks filled by decoding have
            none: on an emulated device nobody knows the tokens they hold.
        slo_class: its class's name.
        targets: what it was promised; `arrival_ns + targets.ttft_ns` is its first deadline.
        priority: larger is more urgent.
        keeps_blocks: when it is over here, its blocks are kept until `HandOver.let_go`.
    """

    rid: int
    arrival_ns: int
    input_tokens: int
    max_output_tokens: int | None = None
    block_hashes: Sequence[int] = ()
    slo_class: str = ""
    targets: Targets = field(default_factory=Targets)
    priority: int = 0
    keeps_blocks: bool = False

    # --- the scheduler's own ---------------------------------------------------------------
    state: RequestState = RequestState.WAITING
    output_limit: int = 0
    """Output tokens at most: the client's bound within the model's and the pool's."""
    blocks: list[int] = field(default_factory=list)
    published_blocks: int = 0
    """Leading blocks that others can find, or were found."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    first_scheduled_ns: int = 0
    preemptions: int = 0
    last_plan: int = 0
    """The last plan that uses its blocks, as of its last chunk or its leaving the cohort."""
    host_blocks: list[int] = field(default_factory=list)
    """Its copy in host memory, or the place for one; empty: none."""
    copied_blocks: int = 0
    """While its blocks are copied: how many of them are done or in flight."""
    admitted_ns: int = 0
    """When it was last admitted."""
    ran_ns: int = 0
    """Time it ran before its last eviction; the rest of its time it has waited, or runs."""
    admitted_tokens: int = 0
    """Its total when it was last admitted."""
    fruitless: bool = False
    """It gained nothing between its last two evictions."""
    first_token_ns: int = 0
    """When a committed step gave it its first token; 0 before."""
    cohort: Epochs | None = None
    joined_epoch: int = 0
    event_epoch: int = 0
    """The epoch in which, as a member, it needs a block or decodes for the last time."""
    last_epoch: int = 0
    """The epoch in which, as a member, it decodes for the last time, at its output limit."""
    base_planned: int = 0
    base_sampled: int = 0
    base_emitted: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens whose keys and values are computed or in flight; catches up with the total."""
        if self.cohort is None:
            return self.base_planned
        return self.base_planned + self.cohort.epoch - self.joined_epoch

    @property
    def sampled_tokens(self) -> int:
        """Output tokens, those in flight included."""
        if self.cohort is None:
            return self.base_sampled
        return self.base_sampled + self.cohort.epoch - self.joined_epoch

    @property
    def output_tokens(self) -> int:
        """Output tokens that committed steps gave it."""
        if self.cohort is None:
            return self.base_emitted
        return self.base_emitted + max(0, self.cohort.committed_epoch - self.joined_epoch)

    @property
    def displaceable(self) -> bool:
        """Whether it may be evicted for one who waits: never twice without gaining a token.

        This alone rules out that requests displace each other in turns and nobody gets on.
        """
        return not self.fruitless or self.total_tokens > self.admitted_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return self.input_tokens + self.sampled_tokens
