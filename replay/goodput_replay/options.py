"""Parsed options of `replay`, and checks of their combinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.errors import UsageError
from goodput_replay.arguments import make_parser
from goodput_replay.run.summary import LengthPinning
from goodput_replay.sending.abort import AbortRule
from goodput_replay.sending.target import Endpoint, Target
from goodput_traces.transforms import ClassRule, Window, parse_class_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReplayOptions", "parse_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of one `replay` command; `--help` describes those not listed here.

    Args:
        trace: trace file, or `sample`.
        max_decoded_bytes: maximum decoded size of the trace; None for the default.
        target: running server; None with `manifest`, `emulate` or `dry_run`.
        manifest: manifest of the service to start before the run and stop afterwards.
        emulate: manifest of the service to emulate in virtual time.
        slo: file with the SLO classes, used with `target`.
        probe: send one probe request per class before the run.
        model: served model for rows that `models` does not map.
        models: served model by the trace's model name.
        class_rule_texts: `class_rules` as written on the command line.
        seed: seed of rate scaling and of the random placement in an emulated fleet.
        pinning: how output lengths are pinned to the trace; None to detect it from the target.
        timeout_ns: time limit of a request from its scheduled arrival.
        salt: salt of the prompts, which separates them from those of other runs; None for a
            random salt.
        out: run folder; None for a new one in `runs/`.
        gate: True if the exit code depends on the verdict.
        gaps: True if every gap between tokens is recorded.
        confidence: one-sided confidence of each bound of an attainment.
    """

    trace: str
    max_decoded_bytes: int | None
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
    probe: bool
    model: str | None
    models: Mapping[str, str]
    headers: Mapping[str, str]
    api_key_env: str | None
    endpoint: Endpoint
    pinning: LengthPinning | None
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
    """Parse the arguments and check their combinations.

    Raises:
        UsageError: an option or a combination of options is invalid.
    """
    parsed = make_parser().parse_args(argv)
    unmapped = [text for text in parsed.model if "=" not in text]
    if len(unmapped) > 1:
        raise UsageError(
            f"replay: --model {unmapped[0]} and --model {unmapped[1]} are mutually exclusive; "
            "map each model of the trace with TRACE=SERVED"
        )
    parsed.models = dict(text.split("=", 1) for text in parsed.model if "=" in text)
    parsed.model = unmapped[0] if unmapped else None
    parsed.headers = dict(parsed.headers)
    parsed.endpoint = Endpoint(parsed.endpoint)
    parsed.pinning = _pinning(parsed.pinning)
    parsed.class_rule_texts = tuple(parsed.class_rule_texts)
    try:
        parsed.class_rules = parse_class_rules(parsed.class_rule_texts)
    except ValueError as error:
        raise UsageError(f"replay: --class-by: {error}") from error
    options = ReplayOptions(**vars(parsed))
    _check_combinations(options)
    return options


def _check_combinations(options: ReplayOptions) -> None:
    if options.target is not None and options.manifest is not None:
        raise UsageError(
            "replay: --target and -f are mutually exclusive; use --target for a running service"
        )
    if options.emulate is not None:
        _check_emulation(options)
        return
    if options.topology is not None:
        raise UsageError("replay: --topology is only supported with --emulate")
    if options.oracle:
        raise UsageError("replay: --oracle is only supported with --emulate")
    if options.target is None and options.manifest is None and not options.dry_run:
        raise UsageError(
            "replay: no target; give --target URL, -f MANIFEST to start a service, "
            "--emulate MANIFEST for virtual time, or --dry-run"
        )
    if options.manifest is not None and options.slo is not None:
        raise UsageError(
            "replay: --slo is only supported with --target; -f uses the manifest's spec.slo"
        )
    if options.device is not None and options.manifest is None:
        raise UsageError("replay: --device is only supported with -f and --emulate")


def _check_emulation(options: ReplayOptions) -> None:
    """Reject options that have no effect in virtual time, such as those about sending."""
    for option, is_set, reason in (
        ("--target", options.target is not None, "choose one of them"),
        ("-f", options.manifest is not None, "choose one of them"),
        ("--slo", options.slo is not None, "the manifest's spec.slo applies"),
        ("--abort-on", options.abort_on is not None, "no target is under load"),
        ("--header", bool(options.headers), "no request is sent"),
        ("--api-key-env", options.api_key_env is not None, "no request is sent"),
        (
            "--model",
            bool(options.models) or options.model is not None,
            "every request uses the manifest's model",
        ),
        ("--yes", options.yes, "no target is under load"),
        ("--no-probe", not options.probe, "no request is sent"),
        ("--endpoint", options.endpoint is not Endpoint.COMPLETIONS, "no request is sent"),
        ("--salt", options.salt is not None, "prompts have no text"),
        (
            "--length-pinning",
            options.pinning not in {None, LengthPinning.HEADER},
            "only the executor receives true lengths",
        ),
    ):
        if is_set:
            raise UsageError(f"replay: {option} and --emulate are mutually exclusive: {reason}")


def _pinning(text: str) -> LengthPinning | None:
    return None if text == "auto" else LengthPinning(text.replace("-", "_"))
