"""Fixtures of all tests: golden files, summary lines, production traces, and a certificate."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from tests.builders.certificates import make_certificate
from tests.builders.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOT = Path(__file__).resolve().parents[1]
_SUMMARY_LINE = "summary_line"


def _has_gpu() -> bool:
    """True if torch can find an NVIDIA GPU; torch itself takes seconds to import."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


# Without a GPU, Triton's interpreter runs our kernel. Triton reads this variable when it is first
# imported, also by torch or transformers, so it is set before any test module is collected.
if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# A busy machine makes examples slow; that is no fault of the code.
settings.register_profile(
    "goodput",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=(HealthCheck.too_slow,),
)
settings.load_profile("goodput")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="rewrite the golden files instead of comparing with them",
    )


def pytest_configure() -> None:
    # A process in the background of a shell, or under nohup, ignores these signals, and so do its
    # child processes, which tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector.

    Collection creates millions of objects that live until the end. The garbage collector would
    visit them again and again, which takes a quarter of the time of collection, and in each full
    run during the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("GOODPUT_FOREIGN"):
        # Building them takes too long for every change.
        reason = "NOT RUN: llama_cpp.server and transformers serve; run `make test-foreign`"
        for item in items:
            if item.get_closest_marker("foreign"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if find_spec("torch") is None:
        missing = pytest.mark.skip(reason="NOT RUN: torch is missing; run `make test-torch`")
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(missing)
    _put_slow_files_first(items)


_SLOW_S = 10
"""Seconds of a test with the marker `slow`, unless the marker states more."""


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """Sort the files, so that no worker begins a long one when the others have ended.

    A worker gets one file after the other, and already gets the next one when two tests of its file
    are left. So that the next file does not wait behind a slow test, the slow tests of a file come
    first, too; the tests in a browser come last, because Playwright's event loop counts as running
    until the browser is closed, and no other loop can run. The files of tests/e2e keep the order of
    their conftest.py.
    """
    slow_s: Counter[Path] = Counter()
    tests_in: Counter[Path] = Counter()
    for item in items:
        tests_in[item.path] += 1
        slow_s[item.path] += _slow_s(item)

    def order(item: pytest.Item) -> tuple[int, int, str, bool, int]:
        if ROOT / "tests" / "e2e" in item.path.parents:
            return -sys.maxsize, 0, "", False, 0
        in_browser = "browser" in getattr(item, "fixturenames", ())
        file = item.path
        return -slow_s[file], -tests_in[file], str(file), in_browser, -_slow_s(item)

    items.sort(key=order)


def _slow_s(item: pytest.Item) -> int:
    """Return the seconds of a slow test; 0 for any other test."""
    marker = item.get_closest_marker("slow")
    if marker is None:
        return 0
    seconds: int = marker.args[0] if marker.args else _SLOW_S
    return seconds


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a line to pytest's summary, also if the test passes.

    Printed and logged lines are dropped if a test passes or runs in a worker process.
    """
    return lambda line: record_property(_SUMMARY_LINE, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in (one for those in terminalreporter.stats.values() for one in those):
        if getattr(report, "when", None) != "call":
            continue
        if lines := [value for name, value in report.user_properties if name == _SUMMARY_LINE]:
            terminalreporter.section(report.nodeid.rpartition("::")[2], "-")
            for line in lines:
                terminalreporter.line(line)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares text with `golden/NAME`, or rewrites it if configured."""

    def compare(name: str, text: str) -> None:
        path = request.path.parent / "golden" / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"{path} is missing; make it with `make golden`"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} changed; see `make golden`"

    return compare


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the certificate of 127.0.0.1 and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Return the folder of published production traces beside the checkout; skip without it."""
    folder = ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip(f"no production traces at {folder}: tests on real traces do not run here")
    return folder
