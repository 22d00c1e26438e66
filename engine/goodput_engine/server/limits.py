"""`PATCH /control/limits`: who may change the core's bounds, and to what.

A revision that only rises makes a late or repeated message harmless: with several writers the
newest decision stands, whatever the order of arrival.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_core.spec.choices import BudgetLaw, Policy
from goodput_engine.messages import Configure, Limits, SetLimits
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.server.refusals import Refusal, bad_request

__all__ = ["LimitsGate"]


class _Patch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMITS_REVISION)]
    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    budget_law: BudgetLaw | None = None
    safety_percent: int | None = None


_PATCH: Final = msgspec.json.Decoder(_Patch)


class LimitsGate:
    """Lets changes of limits through, each newer than the last.

    Args:
        token: what the caller must know; None: nobody may change limits.
        revision: of the limits in force at the start.
    """

    def __init__(self, *, token: str | None, revision: int) -> None:
        self._token = token
        self._revision = revision

    def authorise(self, authorization: str | None) -> None:
        """Check the `Authorization` header.

        Raises:
            Refusal: 403 where no token is configured, 401 for a missing or a wrong one.
        """
        if not self._token:
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                "limits cannot be changed here: the engine was started without "
                "GOODPUT_CONTROL_TOKEN",
                code="control_disabled",
            )
        scheme, _, given = (authorization or "").partition(" ")
        # Headers and environment hold bytes that are no UTF-8 as surrogates.
        known = hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"),
            self._token.encode(errors="surrogateescape"),
        )
        if scheme.lower() != "bearer" or not known:
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "send the control token as `Authorization: Bearer TOKEN`",
                code="invalid_token",
            )

    def read(self, data: bytes, bounds: Configure) -> SetLimits:
        """Validate a change and count its revision.

        Args:
            data: the request's body.
            bounds: what the manifest allows at this moment.

        Raises:
            Refusal: 400 for a bad field or a value out of bounds, 409 for an old revision.
        """
        try:
            patch = _PATCH.decode(data)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"not a change of limits: {error}") from error
        _within(
            "token_budget", patch.token_budget, bounds.min_token_budget, bounds.max_token_budget
        )
        _within("max_num_seqs", patch.max_num_seqs, 1, bounds.max_num_seqs)
        _within("max_waiting", patch.max_waiting, 0, bounds.max_waiting)
        _within("safety_percent", patch.safety_percent, 1, 100)
        paced = bounds.budget_law is not None and POLICIES[Policy(bounds.policy)].paced
        if not paced and (patch.budget_law or patch.safety_percent):
            raise bad_request(
                "nothing sizes the prompts' share of a step here: control.mode is not Auto, or "
                "the policy keeps prompts whole or sizes steps itself",
                "budget_law" if patch.budget_law else "safety_percent",
                "not_paced",
            )
        if patch.revision <= self._revision:
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"revision {patch.revision} is not newer than {self._revision}, which is in force",
                param="revision",
                code="stale_revision",
            )
        self._revision = patch.revision
        return SetLimits(
            revision=patch.revision,
            limits=Limits(
                token_budget=patch.token_budget,
                max_num_seqs=patch.max_num_seqs,
                max_waiting=patch.max_waiting,
                budget_law=patch.budget_law,
                safety_percent=patch.safety_percent,
            ),
        )


def _within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise bad_request(
            f"{name} is {value}; the manifest allows {low} to {high}", name, "out_of_bounds"
        )
