"""SLO classes on the command line."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.traces import steady_rows
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage

from goodput_core.errors import UsageError
from goodput_core.slo.targets import SLOClass, format_objective
from goodput_replay.options import parse_options
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.summary import read_summary
from goodput_replay.slo_options import parse_slo_class, parse_target_ms

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web
    from tests.replay.sending.builders import WriteTrace

HERE = ["--trace", "t", "--target", "http://127.0.0.1:1"]
PROMISES = ["--ttft", "500ms", "--tpot", "50ms"]


CLASSES = {
    "chat:ttft=500ms,tpot=50ms": SLOClass(name="chat", ttft_ms=500, tpot_ms=50),
    "chat:ttft=0.5s,tpot=50ms,objective=99.9%": SLOClass(
        name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction("0.999")
    ),
    "Tier 1: tpot=50ms , ttft=1m, tbt-p99=80ms, e2e=1h": SLOClass(
        name="Tier 1", ttft_ms=60_000, tpot_ms=50, tbt_p99_ms=80, e2e_ms=3_600_000
    ),
    "a:b:ttft=1ms,tpot=1d": None,
    "chat": "'chat' is not an SLO class; write for example chat:ttft=",
    ":ttft=1ms,tpot=1ms": "is not an SLO class",
    "chat:": "class 'chat': '' is not a target; write ttft, tpot, tbt-p99, e2e, objective",
    "chat:ttft=1ms": "class 'chat' has no tpot; write for example",
    "chat:objective=99%": "class 'chat' has no ttft and no tpot",
    "chat:ttft=1ms,tpot=1ms,ttft=2ms": "class 'chat': ttft is given twice",
    "chat:ttft=1ms,tpto=1ms": "class 'chat': 'tpto=1ms' is not a target; did you mean tpot?",
    "chat:ttft=1ms,tpot": "'tpot' is not a target",
    "chat:ttft=500,tpot=1ms": "'500' is not a duration",
    "chat:ttft=1.5ms,tpot=1ms": "'1.5ms' is not a target; give whole milliseconds",
    "chat:ttft=0ms,tpot=1ms": "'0ms' is not a target",
    "chat:ttft=2d,tpot=1ms": "'2d' is not a target",
    "chat:ttft=1ms,tpot=1ms,objective=100%": "'100%' is out of bounds",
    "chat:ttft=1ms,tpot=1ms,objective=0.99": "'0.99' is not a percentage",
    f"{'x' * 41}:ttft=1ms,tpot=1ms": "is not an SLO class",
}


@pytest.mark.parametrize(("text", "expected"), CLASSES.items(), ids=CLASSES)
def test_a_class_is_parsed_or_rejected_in_one_sentence(
    text: str, expected: SLOClass | str | None
) -> None:
    if isinstance(expected, SLOClass):
        assert parse_slo_class(text) == expected
        return
    with pytest.raises(ValueError) as caught:
        parse_slo_class(text)
    assert expected is None or expected in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    name=st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True),
    ttft=st.integers(1, 86_400_000),
    tpot=st.integers(1, 86_400_000),
    objective=st.integers(1, 999_999).map(lambda n: Fraction(n, 1_000_000)),
)
def test_a_class_survives_a_round_trip(
    name: str, ttft: int, tpot: int, objective: Fraction
) -> None:
    text = f"{name}:ttft={ttft}ms,tpot={tpot}ms,objective={format_objective(objective)}"
    expected = SLOClass(name=name, ttft_ms=ttft, tpot_ms=tpot, objective=objective)
    assert parse_slo_class(text) == expected


@given(st.text(max_size=40))
def test_text_without_a_class_or_a_unit_is_rejected_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_slo_class(text.replace(":", ""))
    with pytest.raises(ValueError, match="is not a duration"):
        parse_target_ms(text.rstrip("smhd "))


def test_targets_without_a_class_hold_for_every_request() -> None:
    options = parse_options(
        [*HERE, *PROMISES, "--tbt-p99", "80ms", "--e2e", "10s", "--objective", "99%"]
    )
    assert options.slo_classes == (
        SLOClass(
            name="default",
            ttft_ms=500,
            tpot_ms=50,
            tbt_p99_ms=80,
            e2e_ms=10_000,
            objective=Fraction("0.99"),
        ),
    )


REJECTED = {
    "an objective alone": ([*HERE, "--objective", "99%"], "--ttft is missing; give --ttft and"),
    "a TTFT alone": ([*HERE, "--ttft", "1s"], "--tpot is missing"),
    "targets and a file": ([*HERE, *PROMISES, "--slo", "f"], "--slo and targets on the command"),
    "a class and a file": (
        [*HERE, "--slo-class", "a:ttft=1s,tpot=1s", "--slo", "f"],
        "--slo and targets on the command line",
    ),
    "targets and a manifest": (
        ["--trace", "t", "-f", "c", *PROMISES],
        "only supported with --target; -f uses the manifest's spec.slo",
    ),
    "targets and an emulation": (
        ["--trace", "t", "--emulate", "c", *PROMISES],
        "--emulate uses the manifest's spec.slo",
    ),
    "a class twice": (
        [*HERE, *["--slo-class", "a:ttft=1s,tpot=1s"] * 2],
        "--slo-class: 'a' is already declared; rename it",
    ),
    "a class with the name of all others": (
        [*HERE, *PROMISES, "--slo-class", "default:ttft=1s,tpot=1s"],
        "'default' is already declared by --ttft and --tpot",
    ),
    "seventeen classes": (
        [*HERE, *(w for k in range(17) for w in ("--slo-class", f"c{k}:ttft=1s,tpot=1s"))],
        "17 classes are too many; at most 16",
    ),
    "an outage without targets": ([*HERE, "--outage", "10s"], "--outage needs --ttft and --tpot"),
    "an outage of half a second": (
        [*HERE, *PROMISES, "--outage", "1.5s"],
        "'1.5s' is not an outage; give whole seconds",
    ),
    "no target": ([*HERE, "--slo-class", "chat"], "argument --slo-class: 'chat' is not an SLO"),
}


@pytest.mark.parametrize(("argv", "sentence"), REJECTED.values(), ids=REJECTED)
def test_conflicting_promises_are_named(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


class _Listener(StandIn):
    """A server that lists the class header of each request."""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        CLASSES_SENT.append(request.headers.get("X-SLO-Class"))
        return await super().respond(request)


CLASSES_SENT: list[str | None] = []


@pytest.fixture
def trace(trace_of: WriteTrace) -> Path:
    rows = list(steady_rows(12, input_tokens=8, output_tokens=2))
    names = ("chat", "batch", None)
    return trace_of([replace(row, slo_class=names[i % 3]) for i, row in enumerate(rows)])


async def replayed(trace: Path, out: Path, *arguments: str) -> tuple[int, str]:
    """Replay a trace against a conforming server; returns the exit code and the errors."""
    CLASSES_SENT.clear()
    server = _Listener(answer=lambda n: [*tokens(n), finish(), usage(n), DONE])
    async with running(server) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "goodput_core", "replay", "--trace", str(trace), "--target", url,
            "--out", str(out), "--no-report", "--no-probe", *arguments,
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        _, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, err.decode()


async def test_one_promise_judges_requests_of_all_classes_together(
    trace: Path, tmp_path: Path
) -> None:
    code, err = await replayed(
        trace, tmp_path / "run", *PROMISES, "--objective", "50%", "--outage", "2s"
    )
    assert code in {0, 3}, err  # a busy machine may send too late to be valid
    summary = read_summary(tmp_path / "run")
    (one,) = summary.classes
    assert (one.name, one.requests, one.objective) == ("default", 12, "50%")
    assert (summary.default_class, summary.outage_s) == ("default", 2)
    assert CLASSES_SENT == [None] * 12, "the target does not know this class"


async def test_a_declared_class_is_judged_and_sent_and_the_rest_have_the_other_promise(
    trace: Path, tmp_path: Path
) -> None:
    code, err = await replayed(
        trace, tmp_path / "run", *PROMISES, "--slo-class", "batch:ttft=30s,tpot=1s"
    )
    assert code in {0, 3}, err
    assert {c.name: c.requests for c in read_summary(tmp_path / "run").classes} == {
        "batch": 4,
        "default": 8,
    }
    assert sorted(map(str, CLASSES_SENT)) == ["None"] * 8 + ["batch"] * 4


async def test_without_a_promise_for_all_an_undeclared_class_is_an_error(
    trace: Path, tmp_path: Path
) -> None:
    classes = ("--slo-class", "chat:ttft=1s,tpot=1s")
    code, err = await replayed(trace, tmp_path / "run", *classes)
    assert code == 64
    assert "has the class 'batch', which is not among the SLO classes (chat)" in err
    more = (*classes, "--slo-class", "batch:ttft=1s,tpot=1s")
    code, err = await replayed(trace, tmp_path / "run", *more)
    assert code in {0, 3}, err
    classes_of = [record.slo_class for record in read_records(tmp_path / "run")]
    assert sorted(classes_of) == ["batch"] * 4 + ["chat"] * 8, "the first class is the default"
