"""The prefill budget: the prompt tokens that the next step may compute beside its decodes.

The engine calls `prefill_law` before each step. Every decode takes as long as the complete step.
Therefore the law limits the prompt tokens such that the step meets the tightest TPOT of its
decodes. It never limits the decodes. The module must not know about requests, blocks or policies.
Its inputs are the shape of the step's decodes and the tightest target among them.
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
"""Unit of the budget. A step with decodes computes no prompt tokens if fewer than this are left."""
_MAX_SKIPPED: Final = 8
"""Maximum steps in a row without prompt tokens while a prompt is past its TTFT target."""
_NEWEST_WEIGHT: Final = 0.2
"""Weight of the newest step in the moving average."""
_RISE_DIVISOR: Final = 8
"""The budget rises by at most this fraction (an eighth) in one step, or by one quantum if that is
more."""


class PrefillReason(StrEnum):
    """Reason of a prefill budget; a contract of `/control/state`."""

    CEILING = "Ceiling"
    """All tokens of the step's budget that the decodes leave."""
    UNPROMISED = "Unpromised"
    """All tokens left, because the step has no decode with a target for the time per token."""
    KEEPS_TPOT = "KeepsTPOT"
    """The largest number of tokens with which the step meets the tightest TPOT."""
    RISING = "Rising"
    """Fewer tokens than the tightest TPOT allows, because the budget rises slowly."""
    FLOOR = "Floor"
    """More tokens than the tightest TPOT allows, because of `tokenBudget.min`."""
    SKIPPED = "Skipped"
    """No prompt tokens, because fewer than 64 are left."""
    OVERDUE = "Overdue"
    """Up to 64 tokens after eight skipped steps, because a prompt is past its TTFT target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillParams:
    """Parameters of the law; they may change between two steps.

    Args:
        law: how the budget is computed.
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
        begun_tokens: computed tokens of the prompt in progress; its next chunk reads them.
        overdue: True if a prompt is past its TTFT target; used only if `PrefillState.at_limit`.
        measured: the latest timed step with prompt tokens, if it was not passed before; None
            otherwise. Used only by law `ema`.
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
        share: the latest budget that was computed from a TPOT target; None before the first one.
        skipped: steps in a row that computed no prompt tokens although prompts were unfinished.
    """

    ns_per_token: float = 0.0
    share: int | None = None
    skipped: int = 0

    @property
    def at_limit(self) -> bool:
        """True if an overdue prompt must not be skipped again."""
        return self.skipped >= _MAX_SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecision:
    """One decision of the prefill law.

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

    The budget falls immediately and rises slowly. If fewer than 64 tokens are left for prompts, the
    step computes none, because a smaller chunk is not worth its overhead. To prevent starvation, a
    prompt past its TTFT target gets 64 tokens after eight such steps in a row, as far as
    `max_tokens` allows.

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
        minimum = min(left, _round_up(params.min_tokens - beside.num_decodes))
        if share < minimum:
            share, reason = minimum, PrefillReason.FLOOR
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
    """Return the largest number of prompt tokens that meets the target, and the reason."""
    beside = observation.decodes
    if params.law is BudgetLaw.EMA:
        # Before the first step with a prompt there is no average.
        fitting = target_ns / average - beside.num_decodes if average else QUANTUM_TOKENS
        share = int(max(0, min(left, fitting)))
    else:
        assert params.form is not None, "law `model` needs a form"
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
    limit = last + max(QUANTUM_TOKENS, last // _RISE_DIVISOR)
    limit -= limit % QUANTUM_TOKENS
    return (limit, PrefillReason.RISING) if share > limit else (share, reason)


def _moving_average(average: float, measured: StepSample | None) -> float:
    if measured is None:
        return average
    newest = measured.step_ns / measured.shape.num_tokens
    return average + (newest - average) * _NEWEST_WEIGHT if average else newest


def _round_up(tokens: int) -> int:
    return max(0, -(-tokens // QUANTUM_TOKENS) * QUANTUM_TOKENS)
