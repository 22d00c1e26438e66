"""A load without a trace: the same options give the same requests, with the stated moments."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.dispatch import run_command
from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_replay.load import (
    Lengths,
    LoadArrivals,
    Spacing,
    StatedLoad,
    parse_lengths,
    parse_rate,
    parse_spacing,
)
from goodput_replay.options import parse_options
from goodput_replay.runs.summary import read_summary

ROOT = Path(__file__).parents[2]
ARRIVALS = LoadArrivals(
    rate_per_s=Fraction(50), duration_ns=200 * NS_PER_S, spacing=parse_spacing("poisson")
)
LOAD = StatedLoad(
    arrivals=ARRIVALS,
    input_tokens=parse_lengths("500"),
    output_tokens=parse_lengths("200"),
    seed=0,
)


def with_spacing(text: str) -> StatedLoad:
    return replace(LOAD, arrivals=replace(ARRIVALS, spacing=parse_spacing(text)))


def gaps_s(load: StatedLoad) -> list[float]:
    times = [row.timestamp_start_unix_ns / NS_PER_S for row in load.rows()]
    return [b - a for a, b in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [("poisson", 1), ("constant", 0), ("gamma:1", 1), ("gamma:0.3", 0.3), ("gamma:3", 3)],
)
def test_arrivals_have_the_stated_rate_and_variation(arrivals: str, cv: float) -> None:
    gaps = gaps_s(with_spacing(arrivals))
    # Ten thousand arrivals: the mean is known to cv/100, its variation less well.
    assert fmean(gaps) == pytest.approx(0.02, rel=0.01 + 0.03 * cv)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_a_gamma_process_with_a_variation_of_one_is_the_poisson_process() -> None:
    assert gaps_s(with_spacing("gamma:1")) == gaps_s(LOAD)


@pytest.mark.parametrize(("text", "cv"), [("500", 0), ("500~30%", 0.3), ("500~200%", 2)])
def test_token_counts_have_the_stated_mean_and_spread(text: str, cv: float) -> None:
    load = replace(LOAD, output_tokens=parse_lengths(text))
    counts = [row.output_tokens for row in load.rows()]
    assert fmean(counts) == pytest.approx(500, rel=0.001 + 0.04 * cv)
    assert pstdev(counts) / fmean(counts) == pytest.approx(cv, rel=0.25)
    assert {row.input_tokens for row in load.rows()} == {500}


ANY_ARRIVALS = st.builds(
    LoadArrivals,
    rate_per_s=st.fractions(Fraction(1, 10), 50, max_denominator=100),
    duration_ns=st.integers(1, 20 * NS_PER_S),
    spacing=st.builds(Spacing, text=st.just("x"), cv=st.floats(0.05, 10) | st.just(0.0)),
)
ANY_LOAD = st.builds(
    StatedLoad,
    arrivals=ANY_ARRIVALS | st.integers(1, 100),
    input_tokens=st.builds(
        Lengths, text=st.just("x"), mean=st.integers(1, 10_000_000), cv=st.floats(0, 3)
    ),
    output_tokens=st.builds(
        Lengths, text=st.just("x"), mean=st.integers(1, 100), cv=st.floats(0, 3)
    ),
    seed=st.integers(0, 2**63),
)


@given(load=ANY_LOAD)
@settings(deadline=None)
def test_every_load_is_a_valid_trace_and_repeats_itself(load: StatedLoad) -> None:
    rows = list(load.rows())
    assert rows == list(load.rows())
    times = [row.timestamp_start_unix_ns for row in rows]
    assert times == sorted(times)
    if isinstance(load.arrivals, int):
        assert times == [0] * load.arrivals
    else:
        end_ns = load.arrivals.duration_ns
        assert all(0 <= at < end_ns for at in times)
    assert all(1 <= row.input_tokens <= 10_000_000 and row.output_tokens >= 1 for row in rows)
    assert len({row.request_id for row in rows}) == len(rows)


def test_the_digest_is_that_of_the_options() -> None:
    assert LOAD.digest == replace(LOAD).digest
    changes: dict[str, Any] = {
        "closed": 10_000,
        "rate_per_s": replace(ARRIVALS, rate_per_s=Fraction(51)),
        "duration_ns": replace(ARRIVALS, duration_ns=ARRIVALS.duration_ns + 1),
        "spacing": replace(ARRIVALS, spacing=parse_spacing("gamma:2")),
        "input_tokens": parse_lengths("501"),
        "output_tokens": parse_lengths("200~1%"),
        "seed": 1,
    }
    names = {"input_tokens", "output_tokens", "seed"}
    others = {
        replace(LOAD, **{name if name in names else "arrivals": value}).digest
        for name, value in changes.items()
    }
    assert len(others - {LOAD.digest}) == len(changes)


RATES = {"5/s": Fraction(5), "90/m": Fraction(3, 2), "0.5/h": Fraction(1, 7200)}


@pytest.mark.parametrize(("text", "rate"), RATES.items(), ids=RATES)
def test_a_rate_is_parsed(text: str, rate: Fraction) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_rate, "5", "'5' is not a rate; write for example 5/s"),
        (parse_rate, "0/s", "is not a rate"),
        (parse_rate, "-1/s", "is not a rate"),
        (parse_rate, "5/ms", "is not a rate"),
        (parse_spacing, "uniform", "'uniform' are not arrivals; write poisson, constant or"),
        (parse_spacing, "gamma", "are not arrivals"),
        (parse_spacing, "gamma:0", "CV is above 0"),
        (parse_spacing, "gamma:11", "at most 10"),
        (parse_lengths, "0", "'0' is not a token count"),
        (parse_lengths, "5e3", "is not a token count"),
        (parse_lengths, "10000001", "is not a token count"),
        (parse_lengths, "500~301%", "at most 300%"),
        (parse_lengths, "500~30", "500~30% for counts"),
    ],
)
def test_an_invalid_value_is_rejected_in_one_sentence(parse: Any, text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert sentence in str(caught.value)


HERE = ["--target", "http://127.0.0.1:1"]
OPTIONS = ["--rate", "5/s", "--duration", "20s", "--input-tokens", "50", "--output-tokens", "9~30%"]
REJECTED = {
    "neither trace nor rate": (HERE, "no trace; give --trace TRACE, or --rate 5/s --duration"),
    "a trace and a rate": (["--trace", "t", *HERE, *OPTIONS], "--trace and --rate are mutually"),
    "a trace and arrivals": (
        ["--trace", "t", *HERE, "--arrivals", "poisson"],
        "--trace and --arrivals are mutually exclusive",
    ),
    "no duration": ([*HERE, *OPTIONS[:2], *OPTIONS[4:]], "--duration is missing; a load needs"),
    "arrivals alone": ([*HERE, "--arrivals", "poisson"], "--rate is missing"),
    "too many requests": (
        [*HERE, *OPTIONS, "--rate", "1000000/s"],
        "20,000,000 requests are too many; at most 10,000,000",
    ),
    "no time": ([*HERE, *OPTIONS, "--duration", "0s"], "is zero"),
}


@pytest.mark.parametrize(("argv", "sentence"), REJECTED.values(), ids=REJECTED)
def test_an_incomplete_or_contradictory_load_is_rejected(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)


def test_a_load_without_a_request_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    few = [*OPTIONS, "--rate", "0.001/s"]
    assert run_command(["replay", *few, "--dry-run"]) == 64
    assert "no request arrives with --rate 0.001/s --duration 20s" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_of_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["replay", *OPTIONS, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["requests"] == pytest.approx(100, abs=40)
    assert plan["max_input_tokens"] == 50
    assert plan["trace"] == (
        "--rate 5/s --duration 20s --arrivals poisson --input-tokens 50 --output-tokens 9~30% "
        "--seed 0"
    )


@pytest.mark.parametrize(
    ("rate", "duration", "missing"),
    [
        ("5/s", "200s", []),
        ("2/s", "100s", ["requests of class default, and a PASS at its objective of 99%"]),
        ("90/s", "15s", ["and a PASS requires at least 20 s; choose a window of about 20 s"]),
        ("1/s", "15s", ["the window", "a PASS at its objective of 99% requires at least 300, "]),
        ("0.1/s", "10m", ["more; choose a window of about"]),
    ],
)
def test_a_plan_that_cannot_pass_is_named_before_it_is_sent(
    rate: str, duration: str, missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--rate", rate, "--duration", duration, "--input-tokens", "9", "--output-tokens", "9"]
    promises = ["--ttft", "1s", "--tpot", "1s", "--objective", "99%"]
    assert run_command(["replay", *load, *promises, "--dry-run"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(missing)
    assert all(part in note for part, note in zip(missing, notes, strict=True))


def emulated(folder: Path, *more: str) -> Any:
    manifest = str(ROOT / "examples" / "chat.yaml")
    command = ["replay", *OPTIONS, "--emulate", manifest, "--out", str(folder), "--no-report"]
    assert run_command([*command, *more]) == 0
    return read_summary(folder)


def test_a_load_is_replayed_like_a_trace_and_labelled_synthetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (
        emulated(tmp_path / "1"),
        emulated(tmp_path / "2"),
        emulated(tmp_path / "3", "--seed", "7"),
    )
    assert one.trace == two.trace
    assert (one.trace.name, one.trace.synthetic, one.trace.clock) == (
        "load",
        True,
        "trace-relative",
    )
    assert one.trace.source.startswith("synthetic, made by: replay --rate 5/s")
    assert one.trace.digest != other.trace.digest
    assert one.overall == two.overall
    load = parse_options([*HERE, *OPTIONS]).load
    assert load is not None
    assert one.overall.requests == len(list(load.rows()))
    assert "load (synthetic): " in capsys.readouterr().out
    assert one.overall.input_tokens == 50 * one.overall.requests
