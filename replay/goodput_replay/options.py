"""The command line of `replay`, checked option by option and returned as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.errors import UsageError
from goodput_replay.arguments import Pinning, make_parser
from goodput_replay.body import Endpoint
from goodput_replay.sending.abort import AbortRule
from goodput_replay.target import Target
from goodput_traces.transforms import ClassRule, Window, parse_class_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReplayOptions", "parse_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What was asked for; times in nanoseconds.

    Args:
        trace: a file, or `sample`.
        target: a running server; None: `manifest` says what to start, or nothing is sent.
        manifest: the service to start and stop around the run.
        emulate: the service to emulate in virtual time, in place of a target.
        oracle: with it: order requests by their true lengths, as a bound.
        topology: with it: a file that says how replicas share the work.
        device: device profile for that service.
        slo: file with the promises, for a bare target.
        window, limit, speed, rate_scale, class_rules, seed: transforms of the trace.
        warmup: first rows that are sent and not judged.
        dry_run: say what would be sent, and send nothing.
        max_rate: refuse a plan whose busiest second exceeds this many requests.
        abort_on: when to give the run up.
        yes: a target on another machine may be loaded.
        model: served model for rows that `models` does not map.
        models: served model by the trace's name.
        headers: sent with every request.
        api_key_env: environment variable that holds the bearer token.
        endpoint: which API is called.
        pinning: `auto`, `header`, `max-tokens` or `none`.
        timeout_ns: how long a request may take from its scheduled arrival.
        salt: makes prompts this run's own; None: drawn at random.
        out: the run's folder; None: one below `runs/`.
        force: replace an earlier run there.
        json: print the summary as JSON.
        gate: exit by the verdict.
        gaps: keep every gap between tokens.
        report: write report.html.
        confidence: one-sided, of each bound.
    """

    trace: str
    target: Target | None
    manifest: Path | None
    emulate: Path | None
    oracle: bool
    topology: Path | None
    device: str | None
    slo: Path | None
    window: Window | None
    limit: int | None
    speed: Fraction
    rate_scale: Fraction
    class_rules: tuple[ClassRule, ...]
    class_rule_texts: tuple[str, ...]
    seed: int
    warmup: int
    dry_run: bool
    max_rate: int | None
    abort_on: AbortRule | None
    yes: bool
    model: str | None
    models: Mapping[str, str]
    headers: Mapping[str, str]
    api_key_env: str | None
    endpoint: Endpoint
    pinning: Pinning
    timeout_ns: int
    salt: str | None
    out: Path | None
    force: bool
    json: bool
    gate: bool
    gaps: bool
    report: bool
    confidence: Fraction


def parse_options(argv: Sequence[str]) -> ReplayOptions:
    """Check the arguments.

    Raises:
        UsageError: an option, or a combination of options, that cannot be.
    """
    given = make_parser().parse_args(argv)
    _check_combinations(given)
    models = dict(text.split("=", 1) for text in given.model if "=" in text)
    plain = [text for text in given.model if "=" not in text]
    if len(plain) > 1:
        raise UsageError(
            f"replay: --model {plain[1]} follows --model {plain[0]}; map by TRACE=SERVED"
        )
    return ReplayOptions(
        trace=given.trace,
        target=given.target,
        manifest=given.file,
        emulate=given.emulate,
        oracle=given.oracle,
        topology=given.topology,
        device=given.device,
        slo=given.slo,
        window=given.window,
        limit=given.limit,
        speed=given.speed,
        rate_scale=given.rate_scale,
        class_rules=_class_rules(given.class_by),
        class_rule_texts=tuple(given.class_by),
        seed=given.seed,
        warmup=given.warmup,
        dry_run=given.dry_run,
        max_rate=given.max_rate,
        abort_on=given.abort_on,
        yes=given.yes,
        model=plain[0] if plain else None,
        models=models,
        headers=dict(given.header),
        api_key_env=given.api_key_env,
        endpoint=Endpoint(given.endpoint),
        pinning=Pinning(given.length_pinning),
        timeout_ns=given.timeout,
        salt=given.salt,
        out=given.out,
        force=given.force,
        json=given.json,
        gate=given.gate,
        gaps=not given.no_gaps,
        report=not given.no_report,
        confidence=given.confidence,
    )


def _check_combinations(given: Any) -> None:
    if given.target is not None and given.file is not None:
        raise UsageError(
            "replay: --target and -f exclude each other; a service is running or is started"
        )
    if given.emulate is not None:
        _check_emulation(given)
        return
    if given.topology is not None:
        raise UsageError("replay: --topology is for --emulate; it is not built in real time")
    if given.oracle:
        raise UsageError("replay: --oracle is for --emulate; no server knows true lengths")
    if given.target is None and given.file is None and not given.dry_run:
        raise UsageError(
            "replay: nowhere to send; give --target URL, -f MANIFEST to start a service, "
            "--emulate MANIFEST for virtual time, or --dry-run"
        )
    if given.file is not None and given.slo is not None:
        raise UsageError("replay: --slo is for --target; with -f the manifest's spec.slo holds")
    if given.device is not None and given.file is None:
        raise UsageError(
            "replay: --device is for -f and --emulate; a running target has a device already"
        )


def _check_emulation(given: Any) -> None:
    """In virtual time nothing is sent, so what is about sending has no meaning."""
    for option, asked, why in (
        ("--target", given.target is not None, "a run is sent to a target or emulated"),
        ("-f", given.file is not None, "a service is started or emulated"),
        ("--slo", given.slo is not None, "the manifest's spec.slo holds"),
        ("--abort-on", given.abort_on is not None, "there is no target to be spared"),
        ("--header", bool(given.header), "nothing is sent"),
        ("--api-key-env", given.api_key_env is not None, "nothing is sent"),
        ("--model", bool(given.model), "every row goes to the manifest's model"),
        ("--yes", given.yes, "no machine is loaded"),
        ("--endpoint", given.endpoint != Endpoint.COMPLETIONS, "nothing is sent"),
        ("--salt", given.salt is not None, "prompts have no text"),
        (
            "--length-pinning",
            given.length_pinning not in {Pinning.AUTO, Pinning.HEADER},
            "true lengths are the executor's alone",
        ),
    ):
        if asked:
            raise UsageError(f"replay: {option} and --emulate exclude each other: {why}")


def _class_rules(texts: Sequence[str]) -> tuple[ClassRule, ...]:
    try:
        return parse_class_rules(texts)
    except ValueError as error:
        raise UsageError(f"replay: --class-by: {error}") from error
