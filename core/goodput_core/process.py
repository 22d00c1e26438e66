"""Open files, processors, control groups and scheduling priority of a process."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["control_groups", "count_cpus", "raise_open_files", "share_session_priority"]

_NICE: Final = re.compile(r"nice (-?\d+)\s*$")
_PROC: Final = Path("/proc")
_ROOT: Final = Path("/")
_VERSION_1, _VERSION_2 = 1, 2


def raise_open_files() -> int:
    """Raise the limit of open files to the highest allowed without privileges; return it.

    Container runtimes and shells start a process with a limit of 1,024 files and allow many
    more. The low default exists for `select`, which cannot watch a higher descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS refuses "unlimited"
        hard = soft
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def count_cpus(root: Path = _ROOT) -> int:
    """Return the number of processors that this process may use, at least 1.

    A container often sees all processors of its machine, and its control group limits their time
    (`docker run --cpus`). Threads beyond that limit only delay each other.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not available on macOS
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *_cpu_quotas(root)]))


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[tuple[Path, int]]:
    """Yield folder and version of the control groups that limit this process, with their parents.

    Args:
        controller: the limited resource, such as `cpu`.
        root: the folder that contains `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.strip("/")
        # In a container, the path may be that outside of it; the top is then its own group.
        for place in (group, *group.parents):
            if place.is_relative_to(top):
                yield place, _VERSION_1 if controllers else _VERSION_2


def _cpu_quotas(root: Path) -> Iterator[int]:
    """Yield the whole processors whose time each limited control group of this process may use."""
    for group, version in control_groups("cpu", root):
        names = ("cpu.max",) if version == _VERSION_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            texts = [(group / name).read_text(encoding="ascii") for name in names]
            quota_us, period_us = map(int, " ".join(texts).split())
        except (OSError, ValueError):
            continue  # "max", or no group of this hierarchy
        if quota_us > 0 and period_us > 0:  # version 1 has -1 for no limit
            yield quota_us // period_us


def share_session_priority(pid: int, proc: Path = _PROC) -> None:
    """Give a process in a session of its own the priority of this session.

    Linux can divide the processors among sessions before it divides them among their processes
    (*autogroups*). A new session has the default priority, whatever that of its starter is.
    Without this function, a service that a replay of low priority starts would run before the
    client that measures it. If the system does not have such groups, or does not allow the change,
    nothing is changed.

    Args:
        pid: the process.
        proc: the folder of the system's processes.
    """
    try:
        nice = _NICE.search((proc / "self/autogroup").read_text(encoding="ascii"))
        # Without privileges, the kernel accepts only some changes in a second.
        if nice is not None and int(nice[1]):
            (proc / f"{pid}/autogroup").write_text(nice[1], encoding="ascii")
    except OSError:
        return
