"""Two ways to end an engine or a router without asking it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil

from goodput_core.contract import ENV_LLMSERVICE

if TYPE_CHECKING:
    from tests.e2e.operator.installed import Installed

__all__ = ["kill_pod", "kill_process"]


def kill_process(installed: Installed, pod: str) -> None:
    """All processes of a pod end at once; the pod stays, and starts others."""
    killed = [process for process in psutil.process_iter() if _is_of(process, pod)]
    assert killed, f"processes of {pod}"
    for process in killed:
        process.send_signal(signal.SIGKILL)


def kill_pod(installed: Installed, pod: str) -> None:
    """A pod is gone at once, and its processes two seconds later; another takes its place."""
    installed.kubectl("delete", "pod", pod, "--grace-period=0", "--force")


def _is_of(process: psutil.Process, pod: str) -> bool:
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False
    # A pod's host name is its own; processes of the test have no service.
    return ENV_LLMSERVICE in environment and environment.get("HOSTNAME") == pod
