"""Why the service's law decided as it did: the words that status, events and metrics carry.

Each is a documented constant; docs/control.md explains them to whoever is on call. Renaming one
breaks dashboards and alerts.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["BoundsReason", "ReplicaReason", "ShareReason"]


class ShareReason(StrEnum):
    """Of the prompt tokens of one step."""

    CEILING = "Ceiling"
    """As many as the budget has left beside the decodes."""
    UNPROMISED = "Unpromised"
    """The same: nobody who decodes was promised a time per token."""
    KEEPS_TPOT = "KeepsTPOT"
    """As many as keep the tightest time per token."""
    RISING = "Rising"
    """More would keep it, but the share rises slowly."""
    FLOOR = "Floor"
    """Fewer would keep it, but the lower bound of the budget lets prompts go on."""
    SKIPPED = "Skipped"
    """None: fewer than 64 tokens are left for prompts."""
    OVERDUE = "Overdue"
    """The same, but a prompt has waited past its promise for too many such steps: 64."""


class BoundsReason(StrEnum):
    """Of the token budget's bounds, the safety factor and the batch width."""

    METRICS_MISSING = "MetricsMissing"
    """Routers answered without numbers: everything stays."""
    SCRAPE_FAILED = "ScrapeFailed"
    """Routers did not answer: everything stays."""
    NO_TRAFFIC = "NoTraffic"
    """Nothing came and nothing is in flight: everything stays."""
    SETTLING = "Settling"
    """What has ended so far was served with other bounds or replicas, or had waited for them."""
    TOO_FEW = "TooFew"
    """Not enough requests have ended to tell whether a promise is missed."""
    KEPT = "Kept"
    """No promise is missed."""
    TPOT_MISSED = "TPOTMissed"
    """TPOT is missed and TTFT has slack: smaller steps."""
    TTFT_MISSED = "TTFTMissed"
    """TTFT is missed and TPOT has slack: larger steps."""
    BATCH_TOO_WIDE = "BatchTooWide"
    """TPOT is missed with the smallest steps, by a full batch: fewer requests at once."""
    BATCH_TOO_NARROW = "BatchTooNarrow"
    """TTFT is missed with the largest steps, for want of places: more requests at once."""
    KV_EXHAUSTED = "KVExhausted"
    """A promise is missed while requests evict each other: fewer requests at once."""
    NEEDS_REPLICAS = "NeedsReplicas"
    """A promise is missed that neither the budget nor the batch width can keep."""


class ReplicaReason(StrEnum):
    """Of the number of replicas."""

    BELOW_FLOOR = "BelowFloor"
    """Fewer were asked for than `minReplicas`."""
    ABOVE_CEILING = "AboveCeiling"
    """More were asked for than `maxReplicas`."""
    METRICS_MISSING = "MetricsMissing"
    """Routers answered without numbers: the number stays."""
    SCRAPE_FAILED = "ScrapeFailed"
    """Routers did not answer: the number stays."""
    WOKEN = "Woken"
    """Requests come and there is no replica."""
    STARTING = "Starting"
    """Replicas that were asked for are not routable yet: frozen."""
    UNSETTLED = "Unsettled"
    """Token budgets still follow a change of their devices: frozen."""
    DEMAND = "Demand"
    """More device time is demanded per second than the replicas can give."""
    TREND = "Trend"
    """So it will be when a replica that is asked for now has started."""
    MISSED = "Missed"
    """A promise is missed that neither the budget nor the batch width can keep: one more."""
    NOT_LOAD = "NotLoad"
    """The same, but the replicas have little to do: more of them would not help."""
    QUEUE_DRAINING = "QueueDraining"
    """The same, but the queue is getting shorter."""
    INFEASIBLE = "Infeasible"
    """The same, but one request alone takes longer for a token than was promised."""
    FEWER_SUFFICE = "FewerSuffice"
    """Fewer replicas would have done during the whole stabilisation window."""
    STABILIZING = "Stabilizing"
    """Fewer would do now, but not yet for the whole window."""
    NO_TRAFFIC = "NoTraffic"
    """Nothing has come for the whole window."""
    UNKNOWN_CAPACITY = "UnknownCapacity"
    """Nothing is known of the device, or no request has been answered yet."""
    STEADY = "Steady"
    """As many as are needed."""
