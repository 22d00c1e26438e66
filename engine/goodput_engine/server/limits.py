"""Changes of the core's limits: `PATCH /control/limits`, and the file with the last limits.

Each change has a revision, which must increase, so a late or repeated message has no effect. If
there are several writers, the newest change applies, regardless of the order of arrival.
"""

from __future__ import annotations

import hmac
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from aiohttp import web
from msgspec import structs

from goodput_core.contract import ENV_CONTROL_TOKEN, MAX_LIMITS_REVISION
from goodput_core.spec.choices import BudgetLaw, Policy
from goodput_core.units import NS_PER_S
from goodput_engine.messages import Configure, Limits, SetLimits
from goodput_engine.openai.encoding import require_utf8
from goodput_engine.openai.errors import APIError, bad_request
from goodput_engine.request_bodies import MemoryLimit, read_body
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.server.state import ServerState

__all__ = ["LimitsHandler", "read_last_limits"]

_MAX_BODY_BYTES: Final = 64 << 10
_ALL_BODIES_BYTES: Final = 4 << 20
_BODY_S: Final = 10.0
_MAX_FILE_BYTES: Final = 64 << 10
_MAX_REVISION_JUMP: Final = 1 << 20
_MAX_AHEAD_NS: Final = 3600 * NS_PER_S
_log: Final = logging.getLogger(__name__)

_Revision = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMITS_REVISION)]


class _Patch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    revision: _Revision
    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    budget_law: BudgetLaw | None = None
    safety_percent: int | None = None


class _LastLimits(msgspec.Struct, frozen=True):
    """The fields read from a file of limits; other fields are ignored."""

    revision: _Revision
    token_budget: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    safety_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None


_PATCH: Final = msgspec.json.Decoder(_Patch)
_LAST: Final = msgspec.json.Decoder(_LastLimits)


def _highest_revision(current: int, *, unix_ns: int) -> int:
    """Return the highest revision that may follow another.

    Writers use a counter or Unix nanoseconds as the revision. A revision above both is an error of
    the writer. If it took effect, it would block every later change.

    Args:
        current: the current revision.
        unix_ns: the current Unix time.
    """
    return min(MAX_LIMITS_REVISION, max(current + _MAX_REVISION_JUMP, unix_ns + _MAX_AHEAD_NS))


class LimitsHandler:
    """Handler of `PATCH /control/limits`; each change must be newer than the last.

    Args:
        state: state of the HTTP process.
    """

    def __init__(self, state: ServerState) -> None:
        settings = state.settings
        self._state = state
        self._bodies = MemoryLimit(_ALL_BODIES_BYTES)
        self._token = settings.control_token
        # Only this process sends limits to the core, so this is also the core's revision.
        self._revision = 0 if settings.limits is None else settings.limits.revision

    async def patch(self, request: web.Request) -> web.Response:
        """Validate a change, send it to the core and return its revision."""
        self._authorise(request.headers.get("Authorization"))
        self._state.require_core()
        memory = self._bodies.reserve()
        try:
            body = await read_body(
                request, limit_bytes=_MAX_BODY_BYTES, timeout_s=_BODY_S, memory=memory
            )
        finally:
            memory.release()
        core = self._state.require_core()  # it may have died in the meantime
        change = self._accept(body, self._state.configure)
        core.send(change)
        self._state.limits = _merge(self._state.limits, change)
        revision = msgspec.json.encode({"revision": change.revision})
        return web.Response(body=revision, content_type="application/json")

    def _authorise(self, authorization: str | None) -> None:
        """Check the `Authorization` header.

        Raises:
            APIError: 403 if no token is configured, 401 if the token is missing or wrong.
        """
        if not self._token:
            raise APIError(
                HTTPStatus.FORBIDDEN,
                "limits cannot be changed here: the engine was started without "
                f"{ENV_CONTROL_TOKEN}",
                code="control_disabled",
            )
        scheme, _, given = (authorization or "").partition(" ")
        # In headers and in the environment, bytes that are not UTF-8 appear as surrogates.
        token_matches = hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"),
            self._token.encode(errors="surrogateescape"),
        )
        if scheme.lower() != "bearer" or not token_matches:
            raise APIError(
                HTTPStatus.UNAUTHORIZED,
                "send the control token as `Authorization: Bearer TOKEN`",
                code="invalid_token",
            )

    def _accept(self, data: bytes, bounds: Configure) -> SetLimits:
        """Validate a change and record its revision.

        Args:
            data: the request's body.
            bounds: the manifest's current bounds.

        Raises:
            APIError: 400 for an invalid field, a value out of bounds or an implausible revision;
                409 for an old revision.
        """
        require_utf8(data)
        try:
            patch = _PATCH.decode(data)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not a change of limits: {error}") from error
        _require_within(
            "token_budget", patch.token_budget, bounds.min_token_budget, bounds.max_token_budget
        )
        _require_within("max_num_seqs", patch.max_num_seqs, 1, bounds.max_num_seqs)
        _require_within("max_waiting", patch.max_waiting, 0, bounds.max_waiting)
        _require_within("safety_percent", patch.safety_percent, 1, 100)
        has_budget_law = (
            bounds.budget_law is not None and POLICIES[Policy(bounds.policy)].uses_prefill_budget
        )
        if not has_budget_law and (patch.budget_law or patch.safety_percent):
            raise bad_request(
                "the prefill budget is not controlled here: control.mode is not Auto, or the "
                "policy does not split prompts, or it has a law of its own",
                "budget_law" if patch.budget_law else "safety_percent",
                "not_paced",
            )
        if patch.revision <= self._revision:
            raise APIError(
                HTTPStatus.CONFLICT,
                f"revision {patch.revision} is not newer than {self._revision}, which is in force",
                param="revision",
                code="stale_revision",
            )
        highest = _highest_revision(self._revision, unix_ns=time.time_ns())
        if patch.revision > highest:
            raise bad_request(
                f"revision {patch.revision} is implausible; send {self._revision + 1} or the "
                f"current Unix time in nanoseconds, and at most {highest}",
                "revision",
                "implausible_revision",
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


def read_last_limits(path: Path, bounds: Configure, *, unix_ns: int) -> SetLimits | None:
    """Return the last limits from a file, clamped to the manifest's bounds.

    So an engine that starts while the operator is down keeps the last limits. A missing or damaged
    file does not prevent the start.

    Args:
        path: a JSON object with `revision` and any of `token_budget`, `max_num_seqs` and
            `safety_percent`.
        bounds: the manifest's bounds.
        unix_ns: the current Unix time.

    Returns:
        The limits; None if the file is missing or unusable.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        last = _LAST.decode(data)
        if last.revision > _highest_revision(0, unix_ns=unix_ns):
            raise ValueError(f"revision {last.revision} is implausible")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        detail = str(error)[:200]
        _log.warning("last limits unusable", extra={"file": str(path), "detail": detail})
        return None
    budget, seqs = last.token_budget, last.max_num_seqs
    if budget is not None:
        budget = min(max(budget, bounds.min_token_budget), bounds.max_token_budget)
    return SetLimits(
        revision=last.revision,
        limits=Limits(
            token_budget=budget,
            max_num_seqs=None if seqs is None else min(seqs, bounds.max_num_seqs),
            safety_percent=last.safety_percent,
        ),
    )


def _merge(earlier: SetLimits | None, change: SetLimits) -> SetLimits:
    """Return the limits after a change, for a restarted core."""
    if earlier is None:
        return change
    changed = {name: new for name, new in structs.asdict(change.limits).items() if new is not None}
    return structs.replace(change, limits=structs.replace(earlier.limits, **changed))


def _require_within(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise bad_request(
            f"{name} is {value}; it must be at least {low} and at most {high}",
            name,
            "out_of_bounds",
        )
