"""The prefill budget: the prompt tokens that the next step may compute beside its decodes.

The engine calls `prefill_law` before each step. Every decode takes as long as the complete step, so
the law limits prompt tokens such that the step meets the tightest TPOT of its decodes. Decodes are
never cut. The module must not know about requests, blocks or policies. Its inputs are the shape of
the step's decodes and the tightest target among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from goodput_core.spec.choices import BudgetLaw
from goodput_core.steptime import StepShape, StepTimeForm, largest_prefill
from goodput_core.steptime.fitting import StepSample

__all__ = [
    "QUANTUM_TOKENS",
    "PrefillDecision",
    "PrefillObservation",
    "PrefillParams",
    "PrefillReason",
    "PrefillState",
    "prefill_law",
]

QUANTUM_TOKENS: Final = 64
"""Unit of the budget. A step with decodes and fewer tokens left computes no prompt tokens."""
_MOST_SKIPPED: Final = 8
"""Steps in a row that may compute no prompt tokens while a prompt is past its TTFT target."""
_FOLLOW: Final = 0.2
"""Weight of the newest step in the moving average."""
_RISE: Final = 8
"""The budget rises by at most an eighth in one step, or by one quantum."""


class PrefillReason(StrEnum):
    """Reason of a prefill budget; a contract of `/control/state`."""

    CEILING = "Ceiling"
    """All tokens that the step's budget leaves beside the decodes."""
    UNPROMISED = "Unpromised"
    """All tokens left, because no decode has a target for the time per token."""
    KEEPS_TPOT = "KeepsTPOT"
    """The most tokens that meet the tightest TPOT."""
    RISING = "Rising"
    """Fewer than would meet the tightest TPOT, because the budget rises slowly."""
    FLOOR = "Floor"
    """More than meet the tightest TPOT, because of `tokenBudget.min`."""
    SKIPPED = "Skipped"
    """No prompt tokens, because fewer than 64 are left."""
    OVERDUE = "Overdue"
    """Up to 64 tokens after eight skipped steps, because a prompt is past its TTFT target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParams:
    """Parameters, which may change between two steps.

    Args:
        law: law that decides.
        min_tokens, max_tokens: bounds of the complete step, including its decodes.
        safety_percent: share of the tightest TPOT that a step is planned to take.
        form: step-time model, corrected by measured times; only for law `model`.
    """

    law: BudgetLaw
    min_tokens: int
    max_tokens: int
    safety_percent: int
    form: StepTimeForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillObservation:
    """Observation before a step with unfinished prompts.

    Args:
        decodes: shape of the step without prompts.
        tightest_ns: the tightest TPOT target among the decodes; None if none has one.
        begun_tokens: computed tokens of the prompt in progress, which its next chunk reads.
        overdue: True if a prompt is past its TTFT target; only read if `PrefillState.at_limit`.
        measured: latest step that computed prompt tokens, passed once; only for law `ema`.
    """

    decodes: StepShape
    tightest_ns: int | None
    begun_tokens: int = 0
    overdue: bool = False
    measured: StepSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    """State between two steps.

    Args:
        ns_per_token: moving average of the time per token over steps with prompt tokens; 0 before
            the first one.
        share: the latest budget decided by a law; None before the first one.
        skipped: steps in a row that computed no prompt tokens although prompts were unfinished.
    """

    ns_per_token: float = 0.0
    share: int | None = None
    skipped: int = 0

    @property
    def at_limit(self) -> bool:
        """True if an overdue prompt must not be skipped again."""
        return self.skipped >= _MOST_SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecision:
    """One decision.

    Args:
        tokens: prompt tokens that the step may compute.
        reason: reason of the decision.
        observation, params: inputs of the decision.
        at_ns: time of the decision.
    """

    tokens: int
    reason: PrefillReason
    observation: PrefillObservation
    params: PrefillParams
    at_ns: int


def prefill_law(
    state: PrefillState, observation: PrefillObservation, params: PrefillParams, now_ns: int
) -> tuple[PrefillState, PrefillDecision]:
    """Decide the prompt tokens of one step.

    The budget falls at once and rises slowly. If fewer than 64 tokens are left for prompts, the
    step computes none, because a smaller chunk is not worth its overhead. Prompts never starve:
    after eight such steps in a row a prompt past its TTFT target gets 64 tokens, as far as the
    upper bound allows.

    Source: Agrawal et al., "Sarathi-Serve", OSDI 2024, section 4.3, which sizes chunks by the
    target for the time between tokens, once and offline.
    """
    beside = observation.decodes
    left = max(0, params.max_tokens - beside.num_decodes)
    average = _moving_average(state.ns_per_token, observation.measured)
    share, decided, reason = left, state.share, PrefillReason.CEILING
    if not beside.num_decodes or observation.tightest_ns is None:
        reason = PrefillReason.UNPROMISED
    elif params.law is not BudgetLaw.FIXED:
        target_ns = observation.tightest_ns * params.safety_percent // 100
        share, reason = _tokens_in_time(average, target_ns, observation, params, left)
        share, reason = _limit_rise(share, reason, state.share)
        least = _round_up(params.min_tokens - beside.num_decodes)
        if share < min(least, left):
            share, reason = min(least, left), PrefillReason.FLOOR
        decided = share
    skipped = 0
    if share < QUANTUM_TOKENS and beside.num_decodes:
        if state.at_limit and observation.overdue and left:
            share, reason = min(QUANTUM_TOKENS, left), PrefillReason.OVERDUE
        else:
            share, reason = 0, PrefillReason.SKIPPED
            skipped = state.skipped + 1
    return (
        PrefillState(ns_per_token=average, share=decided, skipped=skipped),
        PrefillDecision(
            tokens=share, reason=reason, observation=observation, params=params, at_ns=now_ns
        ),
    )


def _tokens_in_time(
    average: float,
    target_ns: int,
    observation: PrefillObservation,
    params: PrefillParams,
    left: int,
) -> tuple[int, PrefillReason]:
    """Return the most prompt tokens with which the step meets the target, and the reason."""
    beside = observation.decodes
    if params.law is BudgetLaw.EMA:
        # Before the first step with a prompt there is no average.
        fits = target_ns / average - beside.num_decodes if average else QUANTUM_TOKENS
        share = int(max(0, min(left, fits)))
    else:
        assert params.form is not None, "law `model` predicts by a form"
        share = largest_prefill(
            params.form,
            beside=beside,
            target_ns=target_ns,
            most_tokens=left,
            start=observation.begun_tokens,
        )
    if share == left:
        return share, PrefillReason.CEILING
    return share - share % QUANTUM_TOKENS, PrefillReason.KEEPS_TPOT


def _limit_rise(share: int, reason: PrefillReason, last: int | None) -> tuple[int, PrefillReason]:
    if last is None:
        return share, reason
    most = last + max(QUANTUM_TOKENS, last // _RISE)
    most -= most % QUANTUM_TOKENS
    return (most, PrefillReason.RISING) if share > most else (share, reason)


def _moving_average(average: float, measured: StepSample | None) -> float:
    if measured is None:
        return average
    newest = measured.step_ns / measured.shape.num_tokens
    return average + (newest - average) * _FOLLOW if average else newest


def _round_up(tokens: int) -> int:
    return max(0, -(-tokens // QUANTUM_TOKENS) * QUANTUM_TOKENS)
