"""What was decided last: what is in force, and outlives whoever decided it."""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.control import Bounds

__all__ = ["Decided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was decided last.

    Args:
        limits_revision: rises with each change of `bounds`.
        bounds: the limits of every engine.
        replicas: how many engines there are to be.
    """

    limits_revision: int
    bounds: Bounds
    replicas: int
