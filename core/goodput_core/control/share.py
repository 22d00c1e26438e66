"""The inner loop of the token budget: how many prompt tokens the next step may compute.

Decided before each step, in the engine, for free: a step is as long as what it computes, and who
decodes waits for it. Decodes are never cut; what they leave of the budget is what is shared out
here. It must not know about requests, blocks or policies: the shape of the step's decodes and the
tightest promise among them are all it looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from goodput_core.control.reasons import ShareReason
from goodput_core.spec.choices import BudgetLaw
from goodput_core.steptime import StepShape, StepTimeForm, largest_prefill
from goodput_core.steptime.fitting import StepSample

__all__ = [
    "QUANTUM_TOKENS",
    "ShareDecision",
    "ShareObservation",
    "ShareParams",
    "ShareState",
    "share_law",
]

QUANTUM_TOKENS: Final = 64
"""Shares are multiples of this, and a step with room for less computes no prompts."""
_MOST_SKIPPED: Final = 8
"""Steps in a row that may compute no prompts while one waits past its promise."""
_FOLLOW: Final = 0.2
"""Weight of the newest step in the moving average."""
_RISE: Final = 8
"""A share rises by an eighth of itself in one step, or by one quantum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareParams:
    """What holds from step to step, until it is changed between two.

    Args:
        law: which law decides.
        min_tokens, max_tokens: bounds of the whole step, decodes included.
        safety_percent: share of the tightest time per token that a step is planned to take.
        form: predicts steps and follows the device that serves; for law `model` alone.
    """

    law: BudgetLaw
    min_tokens: int
    max_tokens: int
    safety_percent: int
    form: StepTimeForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareObservation:
    """What is known before a step in which prompts could be computed.

    Args:
        decodes: what the step computes anyway.
        tightest_ns: the smallest time per token promised to any of them; None: to nobody.
        begun_tokens: computed tokens of the prompt that goes on, which its next chunk reads.
        overdue: whether a prompt waits past its promised time to the first token. It is only
            read when `ShareState.skipped` has reached its limit.
        measured: the latest step that computed prompts, once; for law `ema` alone.
    """

    decodes: StepShape
    tightest_ns: int | None
    begun_tokens: int = 0
    overdue: bool = False
    measured: StepSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareState:
    """What is remembered between two steps.

    Args:
        ns_per_token: moving average over steps that computed prompts; 0: none yet.
        share: the latest that a law has decided; None: none yet.
        skipped: steps in a row that computed no prompts although some were there.
    """

    ns_per_token: float = 0.0
    share: int | None = None
    skipped: int = 0

    @property
    def at_limit(self) -> bool:
        """Whether a prompt that is overdue may not be skipped again."""
        return self.skipped >= _MOST_SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDecision:
    """One decision.

    Args:
        tokens: prompt tokens that the step may compute.
        reason: why.
        observation, params: what it was decided on.
        at_ns: when.
    """

    tokens: int
    reason: ShareReason
    observation: ShareObservation
    params: ShareParams
    at_ns: int


def share_law(
    state: ShareState, observation: ShareObservation, params: ShareParams, now_ns: int
) -> tuple[ShareState, ShareDecision]:
    """The prompts' share of one step.

    The share falls at once and rises slowly. Where fewer than 64 tokens are left for prompts, they
    are skipped: a chunk so small costs a whole prompt's bookkeeping. They never starve: after
    eight such steps in a row a prompt that waits past its promise gets 64 tokens, as far as the
    upper bound allows.

    Source: sizing chunks by the promised time between tokens is Agrawal et al.,
    "Sarathi-Serve", OSDI 2024, section 4.3, there once and offline.
    """
    beside = observation.decodes
    room = max(0, params.max_tokens - beside.num_decodes)
    average = _followed(state.ns_per_token, observation.measured)
    share, decided, reason = room, state.share, ShareReason.CEILING
    if not beside.num_decodes or observation.tightest_ns is None:
        reason = ShareReason.UNPROMISED
    elif params.law is not BudgetLaw.FIXED:
        target_ns = observation.tightest_ns * params.safety_percent // 100
        share, reason = _in_time(average, target_ns, observation, params, room)
        share, reason = _slowly(share, reason, state.share)
        least = _rounded_up(params.min_tokens - beside.num_decodes)
        if share < min(least, room):
            share, reason = min(least, room), ShareReason.FLOOR
        decided = share
    skipped = 0
    if share < QUANTUM_TOKENS and beside.num_decodes:
        if state.at_limit and observation.overdue and room:
            share, reason = min(QUANTUM_TOKENS, room), ShareReason.OVERDUE
        else:
            share, reason = 0, ShareReason.SKIPPED
            skipped = state.skipped + 1
    return (
        ShareState(ns_per_token=average, share=decided, skipped=skipped),
        ShareDecision(
            tokens=share, reason=reason, observation=observation, params=params, at_ns=now_ns
        ),
    )


def _in_time(
    average: float, target_ns: int, observation: ShareObservation, params: ShareParams, room: int
) -> tuple[int, ShareReason]:
    """As many prompt tokens as the law says are in time."""
    beside = observation.decodes
    if params.law is BudgetLaw.EMA:
        # Before the first step with a prompt nothing is known of one.
        fits = target_ns / average - beside.num_decodes if average else QUANTUM_TOKENS
        share = int(max(0, min(room, fits)))
    else:
        assert params.form is not None, "law `model` predicts by a form"
        share = largest_prefill(
            params.form,
            beside=beside,
            target_ns=target_ns,
            most_tokens=room,
            start=observation.begun_tokens,
        )
    if share == room:
        return share, ShareReason.CEILING
    return share - share % QUANTUM_TOKENS, ShareReason.KEEPS_TPOT


def _slowly(share: int, reason: ShareReason, last: int | None) -> tuple[int, ShareReason]:
    if last is None:
        return share, reason
    most = last + max(QUANTUM_TOKENS, last // _RISE)
    most -= most % QUANTUM_TOKENS
    return (most, ShareReason.RISING) if share > most else (share, reason)


def _followed(average: float, measured: StepSample | None) -> float:
    if measured is None:
        return average
    newest = measured.step_ns / measured.shape.num_tokens
    return average + (newest - average) * _FOLLOW if average else newest


def _rounded_up(tokens: int) -> int:
    return max(0, -(-tokens // QUANTUM_TOKENS) * QUANTUM_TOKENS)
