"""The replayer: fires a trace at its real timestamps and judges every request.

From Python, `goodput_replay.run(trace=…)` replays a trace and returns the run with its tables, and
`goodput_replay.open_run(folder)` reads a recorded one; see `goodput_replay.notebook`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from goodput_replay.notebook import NotebookRun, open_run, run

__all__ = ["NotebookRun", "open_run", "run"]


def __getattr__(name: str) -> Any:
    # Commands import this package too, and most of them do not need pyarrow.
    if name in __all__:
        from goodput_replay import notebook  # noqa: PLC0415

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
