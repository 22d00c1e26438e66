"""Processes count the processors they may use, and share the priority of their starter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from goodput_core.process import count_cpus, share_session_priority

_OTHER = 4711


def share(root: Path, own: str | None, other: str | None = "/autogroup-2 nice 0\n") -> str | None:
    """Share a priority below a folder in place of /proc; return the other session's file."""
    for name, text in (("self", own), (f"{_OTHER}", other)):
        (root / name).mkdir()
        if text is not None:
            (root / name / "autogroup").write_text(text, encoding="ascii")
    share_session_priority(_OTHER, proc=root)
    path = root / f"{_OTHER}" / "autogroup"
    return path.read_text(encoding="ascii") if path.exists() else None


@pytest.mark.parametrize("nice", ["8", "-5", "19"])
def test_the_priority_of_the_own_session_is_written(tmp_path: Path, nice: str) -> None:
    assert share(tmp_path, f"/autogroup-1 nice {nice}\n") == nice


@pytest.mark.parametrize(
    "own", ["/autogroup-1 nice 0\n", "", "nonsense\n", None], ids=["0", "empty", "other", "none"]
)
def test_nothing_is_written_without_a_changed_priority(tmp_path: Path, own: str | None) -> None:
    assert share(tmp_path, own) == "/autogroup-2 nice 0\n"


def test_a_process_that_has_ended_is_ignored(tmp_path: Path) -> None:
    share_session_priority(_OTHER, proc=tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/autogroup").write_text("/autogroup-1 nice 8\n", encoding="ascii")
    share_session_priority(_OTHER, proc=tmp_path)


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="NOT RUN: the kernel has no autogroups"
)
def test_a_new_session_has_the_priority_of_a_session_that_was_lowered() -> None:
    """Without privileges, the kernel accepts one change in a tenth of a second, of any process."""
    program = """
        import subprocess, sys, time
        from pathlib import Path
        from goodput_core.process import share_session_priority

        def nice(pid):
            return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]

        def lower():
            try:
                Path("/proc/self/autogroup").write_text("7")
            except BlockingIOError:
                pass

        def repeat(change, pid):
            for _ in range(100):
                change()
                if nice(pid) == "7":
                    return
                time.sleep(0.05)

        repeat(lower, "self")
        command = [sys.executable, "-c", "input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
            print(nice(child.pid), end=" ")
            repeat(lambda: share_session_priority(child.pid), child.pid)
            print(nice(child.pid))
            child.communicate(b"\\n")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert (done.stdout, done.stderr) == ("0 7\n", "")


_V2 = {"proc/self/cgroup": "0::/pod/main\n", "sys/fs/cgroup/pod/main/cpu.max": "max 100000\n"}
_V1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/outside/of/the/container\n3:memory:/x\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 16, id="no control groups"),
        pytest.param(_V2, 16, id="a group without a limit"),
        pytest.param(
            {**_V2, "sys/fs/cgroup/pod/cpu.max": "250000 100000"}, 2, id="the limit of a parent"
        ),
        pytest.param(
            {
                **_V2,
                "sys/fs/cgroup/pod/cpu.max": "900000 100000",
                "sys/fs/cgroup/pod/main/cpu.max": "600000 200000",
            },
            3,
            id="the lower of two limits",
        ),
        pytest.param({**_V2, "sys/fs/cgroup/cpu.max": "50000 100000"}, 1, id="half a processor"),
        pytest.param({**_V2, "sys/fs/cgroup/cpu.max": "9900000 100000"}, 16, id="a high limit"),
        pytest.param({**_V2, "sys/fs/cgroup/cpu.max": "nonsense"}, 16, id="no number"),
        pytest.param({**_V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000"}, 4, id="version 1"),
        pytest.param(
            {**_V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, 16, id="version 1 without a limit"
        ),
    ],
)
def test_processors_are_limited_by_the_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert count_cpus(tmp_path) == expected
