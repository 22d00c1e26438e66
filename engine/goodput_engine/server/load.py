"""What a replica says of its load: on its admin port and with each answer, in the same words.

Placement reads it, so whether the replica is saturated is core's to say and is said once. The
header of an answer is fresher than any poll.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.contract import HEADER_LOAD
from goodput_core.placement import is_saturated

if TYPE_CHECKING:
    from goodput_core.engine_state import EngineState
    from goodput_engine.core_client import CoreClient
    from goodput_engine.server.front import Front

__all__ = ["LoadHeader", "load_of"]

_NOTHING: Final[dict[str, str]] = {}


def load_of(core: CoreClient, *, draining: bool) -> dict[str, int | bool]:
    """The load of a running core, as of its last step.

    Args:
        core: it.
        draining: whether the front admits nothing new.
    """
    state = core.state
    saturated = is_saturated(
        running=state.running,
        max_num_seqs=state.max_num_seqs,
        waiting=state.waiting,
        max_waiting=state.max_waiting,
        kv_used_blocks=state.kv_total_blocks - state.kv_free_blocks,
        kv_total_blocks=state.kv_total_blocks,
    )
    return {
        "running": state.running,
        "waiting": state.waiting,
        "max_waiting": state.max_waiting,
        "kv_free_blocks": state.kv_free_blocks,
        "kv_total_blocks": state.kv_total_blocks,
        "saturated": saturated or core.full,
        "draining": state.draining or draining,
    }


class LoadHeader:
    """Makes the header that every answer carries, anew only when something changed.

    Args:
        front: the front's state.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._said: tuple[EngineState | None, bool, bool] = (None, False, False)
        self._headers = _NOTHING

    def headers(self) -> dict[str, str]:
        """The header by its name; none before the core is ready. To be read, not changed."""
        core = self._front.core
        if core is None:
            return _NOTHING
        said = (core.state, core.full, self._front.draining)
        if said != self._said:
            load = load_of(core, draining=self._front.draining)
            self._said = said
            self._headers = {HEADER_LOAD: msgspec.json.encode(load).decode()}
        return self._headers
