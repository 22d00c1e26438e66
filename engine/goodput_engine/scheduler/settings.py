"""What a manifest may tell a policy beside its name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PolicySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of all policies; each takes what concerns it.

    Args:
        batch_timeout_ns: how long `static` and `dynamic` wait for a batch to fill; None: as long
            as they do unless told.
        ageing_ns: waiting that moves a request up one level of `priority`, and is too long for
            `sjf`, at least 1; None: as they do unless told.
    """

    batch_timeout_ns: int | None = None
    ageing_ns: int | None = None
