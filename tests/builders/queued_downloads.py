"""Copies to the host that behave like those of a GPU, on a CPU.

Import this module only after `pytest.importorskip("torch")`.
"""

from __future__ import annotations

import torch

__all__ = ["QueuedDownloads"]


class QueuedDownloads:
    """Copies whose targets hold no values until the host waits for an event behind them.

    Args:
        log: gets `copy`, `event N` and `wait N`, where events are numbered from 0.
    """

    def __init__(self, log: list[str] | None = None) -> None:
        self._log = [] if log is None else log
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._log.append("copy")
        target = torch.full_like(tensor, -1)
        # Later work may change the tensor.
        self._queued.append((target, tensor.clone()))
        return target

    def record(self) -> tuple[int, int]:
        """Return the number of an event, and of the copies before it."""
        event = self._events, len(self._queued)
        self._log.append(f"event {event[0]}")
        self._events += 1
        return event

    def wait(self, event: object) -> None:
        assert isinstance(event, tuple)
        number, copies = event
        self._log.append(f"wait {number}")
        with torch.inference_mode():
            for target, values in self._queued[:copies]:
                target.copy_(values)
