"""Options of `replay`: defaults, values, and rejected combinations."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from goodput_core.errors import UsageError
from goodput_core.spec.choices import Endpoint
from goodput_core.units import NS_PER_S
from goodput_replay.options import parse_options

EMULATED = ["--trace", "t.parquet", "--emulate", "chat.yaml"]
HERE = ["--trace", "t.parquet", "--target", "http://127.0.0.1:1"]


def test_omitted_options_have_defaults() -> None:
    options = parse_options(HERE)
    assert [target.url for target in options.targets] == ["http://127.0.0.1:1"]
    assert options.speed == options.rate_scale == Fraction(1)
    assert options.limit is None
    assert options.timeout_ns == 600 * NS_PER_S
    assert options.endpoint is Endpoint.COMPLETIONS
    assert options.pinning is None
    assert options.confidence == Fraction(19, 20)
    assert options.gaps
    assert options.report
    assert not options.yes


def test_every_option_is_parsed() -> None:
    options = parse_options(
        [*HERE, "--window", "1m..2m", "--limit", "9", "--speed", "2", "--rate-scale", "0.5",
         "--class-by", "a: *", "--class-by", "b: turn > 1", "--model", "x=y", "--model", "z",
         "--header", "X-A: 1", "--header", "X-B: 2", "--abort-on", "error-rate=5%", "--warmup", "3",
         "--max-rate", "7", "--timeout", "30s", "--endpoint", "chat", "--length-pinning", "none",
         "--slo", "slo.yaml", "-o", "o", "--no-gaps", "--no-report", "--gate", "--json",
         "--confidence", "99%", "--seed", "5", "--salt", "s", "--yes", "--force"]
    )  # fmt: skip
    assert options.models == {"x": "y"}
    assert options.model == "z"
    assert options.headers == {"X-A": "1", "X-B": "2"}
    assert [rule.slo_class for rule in options.class_rules] == ["a", "b"]
    assert (options.slo, options.out) == (Path("slo.yaml"), Path("o"))
    assert (options.seed, options.salt, options.warmup, options.max_rate) == (5, "s", 3, 7)
    assert options.rate_scale == Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_metrics_are_served_on_the_loopback_address_unless_one_is_given(
    text: str, address: tuple[str, int]
) -> None:
    assert parse_options([*HERE, "--prometheus", text]).prometheus == address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/metrics"),
        ("https://llm.example/prometheus", "https://llm.example/prometheus"),
    ],
)
def test_a_scraped_page_is_at_metrics_unless_it_has_a_path(text: str, url: str) -> None:
    assert parse_options([*HERE, "--scrape", text, "--scrape", text]).scrape == (url,)


def test_only_a_service_that_is_started_is_scraped_by_default() -> None:
    started = ["--trace", "t.parquet", "-f", "chat.yaml"]
    assert parse_options(started).scrape_service
    assert not parse_options([*started, "--no-scrape"]).scrape_service
    assert not parse_options(HERE).scrape_service
    assert parse_options([*started, "--scrape-metric", "a:b_c"]).scrape_metrics == ("a:b_c",)


WRONG = {
    "a page with a password": (
        [*HERE, "--scrape", "http://me:secret@h/metrics"],
        "the URL contains a user or a password; use --scrape-key-env",
    ),
    "a page without a host": ([*HERE, "--scrape", "file:///etc/passwd"], "is not an HTTP URL"),
    "17 pages": (
        [*HERE, *(arg for n in range(17) for arg in ("--scrape", f"h:{n + 1}"))],
        "--scrape: 17 are too many; give at most 16",
    ),
    "a metric with labels": (
        [*HERE, "--scrape", "h", "--scrape-metric", 'up{a="b"}'],
        "is not a metric to record; write the name of a gauge or a counter, without labels",
    ),
    "a histogram": (
        [*HERE, "--scrape", "h", "--scrape-metric", "ttft_seconds_bucket"],
        "is not a metric to record",
    ),
    "a metric of no page": (
        [*HERE, "--scrape-metric", "up"],
        "--scrape-metric is only supported with --scrape and -f",
    ),
    "a revision of no recordings": (
        [*HERE, "--recorded-revision", "chat-0a1b2c3d"],
        "--recorded-revision is only supported with --check-recorded",
    ),
    "a key for no page": (
        [*HERE, "--scrape-key-env", "KEY"],
        "--scrape-key-env is only supported with --scrape",
    ),
    "no scraping of a target": ([*HERE, "--no-scrape"], "--no-scrape is only supported with -f"),
    "a page in virtual time": (
        [*EMULATED, "--scrape", "h"],
        "--scrape and --emulate are mutually exclusive: no server runs",
    ),
    "a metrics port with a name": (
        [*HERE, "--prometheus", "localhost:9464"],
        "'localhost:9464' has no IP address before the port; write for example 0.0.0.0:9464",
    ),
    "a metrics port with letters": ([*HERE, "--prometheus", "1.2.3.4:http"], "is not a port"),
    "metrics in virtual time": (
        [*EMULATED, "--prometheus", "9464"],
        "--prometheus and --emulate are mutually exclusive: the run takes seconds",
    ),
    "no trace": (["--target", "http://h"], "--trace"),
    "no target": (["--trace", "t"], "no target"),
    "token ids in a chat": (
        [*HERE, "--prompt", "tokens", "--endpoint", "chat"],
        "--prompt tokens and --endpoint chat are mutually exclusive",
    ),
    "token ids with a tokenizer": (
        [*HERE, "--prompt", "tokens", "--tokenizer", "x"],
        "--prompt tokens and --tokenizer are mutually exclusive",
    ),
    "a tokenizer in virtual time": (
        ["--trace", "t", "--emulate", "chat.yaml", "--tokenizer", "x"],
        "--tokenizer and --emulate are mutually exclusive",
    ),
    "two targets": ([*HERE, "-f", "chat.yaml"], "are mutually exclusive"),
    "two SLOs": (
        ["--trace", "t", "-f", "c", "--slo", "s"],
        "--slo is only supported with --target",
    ),
    "a device for a target": ([*HERE, "--device", "d"], "--device is only supported with -f"),
    "a folder for a target": (
        [*HERE, "--model-path", "d"],
        "--model-path is only supported with -f",
    ),
    "a folder in virtual time": (
        ["--trace", "t", "--emulate", "chat.yaml", "--model-path", "d"],
        "--model-path is only supported with -f",
    ),
    "a folder and a device": (
        ["--trace", "t", "-f", "chat.yaml", "--model-path", "d", "--device", "d"],
        "--device and --model-path exclude each other",
    ),
    "a target and an emulation": (
        [*HERE, "--emulate", "c"],
        "--target and --emulate are mutually exclusive",
    ),
    "a service and an emulation": (
        ["--trace", "t", "-f", "c", "--emulate", "c"],
        "-f and --emulate",
    ),
    "an SLO of an emulation": ([*EMULATED, "--slo", "s"], "the manifest's spec.slo applies"),
    "an abort rule of an emulation": ([*EMULATED, "--abort-on", "error-rate=5%"], "--abort-on and"),
    "a header of an emulation": ([*EMULATED, "--header", "A: b"], "no request is sent"),
    "a key of an emulation": ([*EMULATED, "--api-key-env", "KEY"], "--api-key-env and"),
    "an endpoint of an emulation": ([*EMULATED, "--endpoint", "chat"], "--endpoint and"),
    "a salt of an emulation": ([*EMULATED, "--salt", "s"], "prompts have no text"),
    "disclosed lengths": (
        [*EMULATED, "--length-pinning", "max-tokens"],
        "only the executor receives true lengths",
    ),
    "a model of an emulation": ([*EMULATED, "--model", "m"], "--model and --emulate"),
    "permission of an emulation": ([*EMULATED, "--yes"], "no target is under load"),
    "a topology for a server": (
        [*HERE, "--topology", "t"],
        "--topology is only supported with --emulate",
    ),
    "an oracle for a server": ([*HERE, "--oracle"], "--oracle is only supported with --emulate"),
    "two models": ([*HERE, "--model", "a", "--model", "b"], "map each model of the trace with"),
    "no URL": (["--trace", "t", "--target", "http://"], "is not an HTTP URL"),
    "a window": ([*HERE, "--window", "5m"], "is not a window"),
    "a duration": ([*HERE, "--timeout", "30"], "is not a duration"),
    "a timeout out of range": ([*HERE, "--timeout", "1ms"], "out of range"),
    "a negative count": ([*HERE, "--limit", "-1"], "--limit"),
    "no rows": ([*HERE, "--limit", "0"], "must be an integer of at least 1"),
    "a class rule": ([*HERE, "--class-by", "a"], "--class-by: 'a' is not a class rule"),
    "a rate": ([*HERE, "--rate-scale", "0"], "--rate-scale"),
    "a confidence": ([*HERE, "--confidence", "95"], "is not a percentage"),
    "an option": ([*HERE, "--windo", "1m..2m"], "--windo"),
    "a salt": ([*HERE, "--salt", "a b"], "is not a valid salt"),
}


@pytest.mark.parametrize(("argv", "sentence"), WRONG.values(), ids=WRONG)
def test_an_invalid_command_line_is_reported_in_one_sentence(
    argv: list[str], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(argv)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_on_the_command_line_is_rejected_and_not_printed() -> None:
    with pytest.raises(UsageError, match="not the name of an environment variable") as caught:
        parse_options([*HERE, "--api-key-env", "sk-hunter2"])
    assert "hunter2" not in str(caught.value)


def test_a_dry_run_needs_no_target() -> None:
    assert parse_options(["--trace", "t", "--dry-run"]).targets == ()
