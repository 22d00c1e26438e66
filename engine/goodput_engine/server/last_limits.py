"""The limits that an engine begins with, from the file in which the last ones are kept.

Whoever sets limits may be gone when an engine starts: it goes on with what was set last. A file
that is missing or damaged keeps no engine from starting, with the manifest's limits then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_engine.messages import Limits, SetLimits

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.messages import Configure

__all__ = ["read_last_limits"]

_MAX_BYTES: Final = 64 << 10
_log: Final = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """What is read of the file; the rest is passed over."""

    revision: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMITS_REVISION)]
    token_budget: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    safety_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None


_KEPT: Final = msgspec.json.Decoder(_Kept)


def read_last_limits(path: Path, configure: Configure) -> SetLimits | None:
    """The limits that a file keeps, within the manifest's bounds; None: none that can be used.

    Args:
        path: a JSON object with `revision` and any of `token_budget`, `max_num_seqs` and
            `safety_percent`.
        configure: the manifest's bounds.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        kept = _KEPT.decode(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        detail = str(error)[:200]
        _log.warning("last limits unusable", extra={"file": str(path), "detail": detail})
        return None
    budget, seqs = kept.token_budget, kept.max_num_seqs
    if budget is not None:
        budget = min(max(budget, configure.min_token_budget), configure.max_token_budget)
    return SetLimits(
        revision=kept.revision,
        limits=Limits(
            token_budget=budget,
            max_num_seqs=None if seqs is None else min(seqs, configure.max_num_seqs),
            safety_percent=kept.safety_percent,
        ),
    )
