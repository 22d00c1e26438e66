"""The control law of one emulated run, and its decisions in the run's folder."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from goodput_replay.emulation.control import ControlLoop, decision_line
from goodput_replay.run.files import DECISIONS_FILE, PARTIAL_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from goodput_core.control import ServiceDecision
    from goodput_replay.emulation.settings import FleetSettings

__all__ = ["control_loop"]


@contextmanager
def control_loop(settings: FleetSettings, folder: Path) -> Iterator[ControlLoop | None]:
    """The law that the manifest asks for; its decisions are kept in `decisions.jsonl`.

    Args:
        settings: of the fleet.
        folder: the run's.

    Yields:
        The loop; None: the manifest wants none.

    Raises:
        OSError: the file could not be written.
    """
    rules = settings.control
    if rules is None:
        yield None
        return
    # Like the records, they are in their place when the run's records are whole.
    with (folder / (DECISIONS_FILE + PARTIAL_SUFFIX)).open("wb") as file:

        def keep(decision: ServiceDecision) -> None:
            file.write(decision_line(decision))

        yield ControlLoop(rules.params, interval_ns=rules.interval_ns, decided=keep)
