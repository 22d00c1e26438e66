"""Recordings of a service with itself, the history of a gate; and the verdict on a run."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.e2e.installation import ChartRelease

__all__ = ["judge", "recordings"]

_RECORDINGS: Final = 4
"""One more than a gate needs, because a busy machine may make one of them invalid."""
_REPLAY: Final = str(Path(sys.executable).parent / "replay")


@contextmanager
def recordings(
    installation: ChartRelease,
    name: str,
    folder: Path,
    *,
    slo: object,
    trace: Path,
    window_s: int,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start recordings of one pair of runs each, and end them with the block.

    Args:
        installation: the installation of the operator.
        name: name of the service.
        folder: folder of the recordings.
        slo: the `spec.slo` of the service.
        trace: the sent trace.
        window_s: the sent part of the trace, from its start, in seconds.
    """
    folder.mkdir()
    slo_file = folder.with_suffix(".slo.json")
    slo_file.write_text(json.dumps(slo), encoding="utf-8")
    url = installation.url(name)
    words = [_REPLAY, "ab", "--trace", str(trace), "--window", f"0s..{window_s}s", "--pairs", "1"]
    words += ["--target", url, "--target", url, "--slo", str(slo_file), "--yes"]
    with ExitStack() as stack:
        running = []
        for night in range(_RECORDINGS):
            process = subprocess.Popen(
                installation.client_command(*words, "--out", str(folder / f"night-{night}")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        yield running


def judge(run: Path, *options: str) -> dict[str, Any]:
    """Return the result of `replay gate` on a run."""
    done = subprocess.run(
        [_REPLAY, "gate", str(run), *options, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result
