"""The process that shows a run never decides about the run."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from typing import TYPE_CHECKING

from rich.console import Console

from goodput_replay.live import observer
from goodput_replay.live.observer import ObserverOptions, RunObserver

if TYPE_CHECKING:
    import pytest


def test_an_observer_that_does_not_end_is_killed_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer, "_CLOSE_S", 0.05)
    text = io.StringIO()

    async def observe() -> int:
        shown = RunObserver(ObserverOptions(), Console(file=text))
        async with shown:
            await shown.wait_ready()
            child = shown._child
            assert child is not None
            os.kill(child.pid, signal.SIGSTOP)  # as without any CPU time
        assert child.returncode is not None
        return child.returncode

    assert asyncio.run(observe()) == -signal.SIGKILL
    assert text.getvalue() == (
        "warning: the process that shows the run did not end within 0.05 s and was killed; the run "
        "itself is complete\n"
    )
