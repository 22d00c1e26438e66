"""A process that is started in a session of its own keeps the priority of its starter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from goodput_core.process import share_session_priority

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
