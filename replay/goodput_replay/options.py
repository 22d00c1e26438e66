"""Parsed options of `replay`, and checks of their combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.errors import UsageError
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import Endpoint, PromptEncoding
from goodput_replay.arguments import DEFAULT_TIMEOUT_NS, make_parser
from goodput_replay.load import LoadArrivals, StatedLoad, parse_spacing
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.sending.abort import AbortRule
from goodput_replay.sending.target import Target
from goodput_replay.shares import Share
from goodput_replay.slo_options import OTHER_CLASS
from goodput_traces.transforms import ClassRule, SessionArrivals, Window, parse_class_rules

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

__all__ = ["ReplayOptions", "parse_options"]

_MAX_CLASSES: Final = 16
_MAX_PAGES: Final = 16
_MAX_METRICS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of one `replay` command; `--help` describes those not listed here.

    Args:
        trace: trace file, or `sample`; None with `load`.
        load: synthetic load in place of a trace.
        max_decoded_bytes: maximum decoded size of the trace; None for the default.
        targets: running servers; empty with `manifest`, `emulate` or `dry_run`.
        manifest: manifest of the service to start before the run and stop afterwards.
        emulate: manifest of the service to emulate in virtual time.
        slo: file with the SLO classes, used with `target`.
        slo_classes: SLO classes declared on the command line; the class of requests of all other
            classes has the name `OTHER_CLASS` and is the last one.
        outage_s: the longest outage that the bounds take into account, with `slo_classes`; None if
            none is declared.
        concurrency: number of clients in a closed loop; None for an open loop at the times of the
            trace.
        workers: number of processes that send; None for a number that suits the plan.
        shard: the requests of the plan that this command sends.
        start_at_ns: start of the run, nanoseconds since the Unix epoch; None to start when
            everything is ready.
        arm: address and port on which the start is awaited; None if it is not.
        causal: True if a request of a session waits for the one before it.
        probe: send one probe request per class before the run.
        prompt: the form of prompts.
        tokenizer: file, folder or model name of a tokenizer; None for prompts without one.
        model: served model for rows that `models` does not map.
        models: served model by the trace's model name.
        class_rule_texts: `class_rules` as written on the command line.
        seed: seed of rate scaling, session starts and the random placement in an emulated fleet.
        pinning: how output lengths are pinned to the trace; None to detect it from the target.
        timeout_ns: time limit of a request from its scheduled arrival.
        class_timeouts_ns: time limits of the classes that have their own.
        retries: how often a request that failed before its first token is sent again.
        ca_file: certificates to trust, PEM; None for those of the system.
        salt: salt of the prompts, which separates them from those of other runs; None for a
            random salt.
        out: run folder; None for a new one in `runs/`.
        upload: place in object storage to which the complete run is copied; None for no copy.
        result_file: file for the result, such as a pod's termination message; None for none.
        gate: True if the exit code depends on the verdict.
        check_baseline, check_recorded: an earlier run, and a folder of recordings, with which the
            run must be comparable; a path or a URI, None for none.
        gaps: True if every gap between tokens is recorded.
        confidence: one-sided confidence of each bound of an attainment.
        ui: True to serve a live page.
        ui_port: port of the live page; None for any free one.
        scrape: metrics pages of the target.
        scrape_metrics: metrics to record besides the known ones.
        scrape_service: True to scrape the engines of the service that `manifest` starts.
        scrape_key_env: environment variable of the key for the pages of `scrape`.
        prometheus: address and port of the metrics page; None for no page.
    """

    trace: str | None
    load: StatedLoad | None
    max_decoded_bytes: int | None
    targets: tuple[Target, ...]
    manifest: Path | None
    emulate: Path | None
    oracle: bool
    topology: Path | None
    device: str | None
    model_path: str | None
    slo: Path | None
    slo_classes: tuple[SLOClass, ...]
    outage_s: int | None
    session_arrivals: SessionArrivals | None
    window: Window | None
    limit: int | None
    speed: Fraction
    rate_scale: Fraction
    class_rules: tuple[ClassRule, ...]
    class_rule_texts: tuple[str, ...]
    seed: int
    warmup: int
    concurrency: int | None
    workers: int | None
    shard: Share
    start_at_ns: int | None
    arm: tuple[str, int] | None
    causal: bool
    dry_run: bool
    test_target: bool
    max_rate: int | None
    abort_on: AbortRule | None
    yes: bool
    probe: bool
    model: str | None
    models: Mapping[str, str]
    headers: Mapping[str, str]
    api_key_env: str | None
    endpoint: Endpoint
    prompt: PromptKind
    tokenizer: str | None
    pinning: LengthPinning | None
    timeout_ns: int
    class_timeouts_ns: Mapping[str, int]
    retries: int
    ca_file: Path | None
    salt: str | None
    out: Path | None
    force: bool
    upload: str | None
    result_file: Path | None
    json: bool
    gate: bool
    check_baseline: str | None
    check_recorded: str | None
    recorded_revision: str | None
    gaps: bool
    report: bool
    confidence: Fraction
    ui: bool
    ui_port: int | None
    prometheus: tuple[str, int] | None
    scrape: tuple[str, ...]
    scrape_metrics: tuple[str, ...]
    scrape_service: bool
    scrape_key_env: str | None


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
    parsed.targets = tuple(parsed.targets)
    if parsed.manifest is None and not parsed.scrape_service:
        raise UsageError("replay: --no-scrape is only supported with -f")
    parsed.scrape_service &= parsed.manifest is not None
    parsed.scrape = tuple(dict.fromkeys(parsed.scrape))
    parsed.scrape_metrics = tuple(dict.fromkeys(parsed.scrape_metrics))
    parsed.timeout_ns, parsed.class_timeouts_ns = _timeouts(parsed.__dict__.pop("timeouts"))
    parsed.headers = dict(parsed.headers)
    parsed.endpoint = Endpoint(parsed.endpoint)
    parsed.prompt = _prompt_kind(parsed)
    pinning = parsed.pinning.replace("-", "_")
    parsed.pinning = None if pinning == "auto" else LengthPinning(pinning)
    parsed.causal = parsed.__dict__.pop("sessions") == "causal"
    parsed.load = _load(parsed)
    parsed.slo_classes = _slo_classes(parsed)
    parsed.class_rule_texts = tuple(parsed.class_rule_texts)
    try:
        parsed.class_rules = parse_class_rules(parsed.class_rule_texts)
    except ValueError as error:
        raise UsageError(f"replay: --class-by: {error}") from error
    options = ReplayOptions(**vars(parsed))
    _check_combinations(options)
    return options


def _prompt_kind(parsed: Namespace) -> PromptKind:
    if parsed.prompt == PromptEncoding.TOKENS:
        if parsed.endpoint is Endpoint.CHAT:
            raise UsageError(
                "replay: --prompt tokens and --endpoint chat are mutually exclusive: the messages "
                "of a chat are text"
            )
        if parsed.tokenizer is not None:
            raise UsageError(
                "replay: --prompt tokens and --tokenizer are mutually exclusive: token ids need no "
                "tokenizer"
            )
        return PromptKind.TOKEN_IDS
    if parsed.tokenizer is not None:
        return PromptKind.TOKENIZER_WORDS
    if parsed.prompt == PromptEncoding.TEXT or parsed.endpoint is Endpoint.CHAT:
        return PromptKind.INVENTED_WORDS
    return PromptKind.TOKEN_IDS


def _timeouts(given: Sequence[tuple[str, int]]) -> tuple[int, dict[str, int]]:
    """Return the time limit of all requests, and those of classes."""
    counts = Counter(name for name, _ in given)
    repeated = next((name for name, count in counts.items() if count > 1), None)
    if repeated is not None:
        of_class = f" for class {repeated!r}" if repeated else ""
        raise UsageError(f"replay: --timeout is given twice{of_class}; remove one")
    timeouts = dict(given)
    return timeouts.pop("", DEFAULT_TIMEOUT_NS), timeouts


def _load(parsed: Namespace) -> StatedLoad | None:
    """Return the synthetic load; removes its options from the arguments."""
    names = ("rate", "duration_ns", "spacing", "input_tokens", "output_tokens")
    rate, duration_ns, spacing, input_tokens, output_tokens = (
        parsed.__dict__.pop(name) for name in names
    )
    timing = {"--rate": rate, "--duration": duration_ns, "--arrivals": spacing}
    lengths = {"--input-tokens": input_tokens, "--output-tokens": output_tokens}
    used = [option for option, value in (timing | lengths).items() if value is not None]
    if parsed.trace is not None:
        if used:
            raise UsageError(
                f"replay: --trace and {used[0]} are mutually exclusive; a trace has its own "
                "arrivals and token counts"
            )
        return None
    if not used:
        raise UsageError(
            "replay: no trace; give --trace TRACE, or "
            "--rate 5/s --duration 5m --input-tokens 500 --output-tokens 200"
        )
    closed = parsed.concurrency is not None
    if closed and used[0] in timing:
        raise UsageError(
            f"replay: {used[0]} and --concurrency are mutually exclusive: clients in a closed loop "
            "send when they are free; give the number of requests with --limit"
        )
    needed = {"--limit": parsed.limit} if closed else {"--rate": rate, "--duration": duration_ns}
    needed |= lengths
    missing = [option for option, value in needed.items() if value is None]
    if missing:
        raise UsageError(f"replay: {missing[0]} is missing; a load needs {', '.join(needed)}")
    arrivals: LoadArrivals | int = parsed.limit
    if not closed:
        spacing = spacing or parse_spacing("poisson")
        arrivals = LoadArrivals(rate_per_s=rate, duration_ns=duration_ns, spacing=spacing)
    return StatedLoad(
        arrivals=arrivals,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        seed=parsed.seed,
    )


def _slo_classes(parsed: Namespace) -> tuple[SLOClass, ...]:
    """Return the declared classes; removes the options of single targets from the arguments."""
    names = ("ttft_ms", "tpot_ms", "tbt_p99_ms", "e2e_ms", "objective")
    targets = {name: parsed.__dict__.pop(name) for name in names}
    classes: list[SLOClass] = list(parsed.slo_classes)
    if any(value is not None for value in targets.values()):
        for option, name in (("--ttft", "ttft_ms"), ("--tpot", "tpot_ms")):
            if targets[name] is None:
                raise UsageError(
                    f"replay: {option} is missing; give --ttft and --tpot, or one --slo-class for "
                    "each class"
                )
        classes.append(SLOClass(name=OTHER_CLASS, **targets))
    counts = Counter(one.name for one in classes)
    repeated = next((name for name, count in counts.items() if count > 1), None)
    if repeated is not None:
        also = " by --ttft and --tpot" if repeated == OTHER_CLASS else ""
        raise UsageError(f"replay: --slo-class: {repeated!r} is already declared{also}; rename it")
    if len(classes) > _MAX_CLASSES:
        raise UsageError(
            f"replay: --slo-class: {len(classes)} classes are too many; at most {_MAX_CLASSES}"
        )
    return tuple(classes)


def _check_combinations(options: ReplayOptions) -> None:
    if options.targets and options.manifest is not None:
        raise UsageError(
            "replay: --target and -f are mutually exclusive; use --target for a running service"
        )
    if options.slo_classes and options.slo is not None:
        raise UsageError(
            "replay: --slo and targets on the command line (--ttft, --tpot, --slo-class) are "
            "mutually exclusive; choose one of them"
        )
    if options.outage_s is not None and not options.slo_classes:
        raise UsageError(
            "replay: --outage needs --ttft and --tpot, or --slo-class; in a file, set "
            "slo.outageSeconds"
        )
    if options.slo_classes and (options.manifest or options.emulate) is not None:
        option = "-f" if options.manifest is not None else "--emulate"
        raise UsageError(
            "replay: --ttft, --tpot and --slo-class are only supported with --target; "
            f"{option} uses the manifest's spec.slo"
        )
    if options.test_target and not (options.dry_run and options.targets):
        raise UsageError("replay: --test-target is only supported with --dry-run and --target")
    _check_dependent(options)
    _check_model_path(options)
    _check_scraping(options)
    _check_closed_loop(options)
    _check_shard(options)
    _check_arm(options)
    _check_causal(options)
    if options.emulate is not None:
        _check_emulation(options)
        return
    if options.topology is not None:
        raise UsageError("replay: --topology is only supported with --emulate")
    if options.oracle:
        raise UsageError("replay: --oracle is only supported with --emulate")
    urls = (*(target.url for target in options.targets), *options.scrape)
    https = any(url.startswith("https:") for url in urls)
    if options.ca_file is not None and not https:
        raise UsageError("replay: --ca-file is only supported with an https:// target or page")
    if not options.targets and options.manifest is None and not options.dry_run:
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


def _check_model_path(options: ReplayOptions) -> None:
    if options.model_path is None:
        return
    if options.manifest is None:
        raise UsageError("replay: --model-path is only supported with -f")
    if options.device is not None:
        raise UsageError("replay: --device and --model-path exclude each other; give one")


def _check_scraping(options: ReplayOptions) -> None:
    for option, given, most in (
        ("--scrape", options.scrape, _MAX_PAGES),
        ("--scrape-metric", options.scrape_metrics, _MAX_METRICS),
    ):
        if len(given) > most:
            raise UsageError(f"replay: {option}: {len(given)} are too many; give at most {most}")
    if options.scrape_key_env is not None and not options.scrape:
        raise UsageError("replay: --scrape-key-env is only supported with --scrape")
    if options.scrape_metrics and not options.scrape and not options.scrape_service:
        raise UsageError("replay: --scrape-metric is only supported with --scrape and -f")


def _check_closed_loop(options: ReplayOptions) -> None:
    """Reject options that concern the times of the trace, or a verdict."""
    if options.concurrency is None:
        return
    ignored = "the times of the trace do not apply"
    one_list = "all clients take the next request of one list"
    for option, is_set, reason in (
        ("--emulate", options.emulate is not None, "virtual time has only an open loop; use -f"),
        ("--gate", options.gate, "a load that adapts to the target gets no verdict"),
        ("--workers", (options.workers or 1) > 1, f"{one_list}; remove --workers"),
        ("--shard", options.shard.count > 1, f"{one_list}; start one closed loop per machine"),
        ("--speed", options.speed != 1, ignored),
        ("--rate-scale", options.rate_scale != 1, ignored),
        ("--max-rate", options.max_rate is not None, ignored),
    ):
        if is_set:
            raise UsageError(f"replay: {option} and --concurrency are mutually exclusive: {reason}")


def _check_shard(options: ReplayOptions) -> None:
    """Reject options with which shards would not form one run."""
    if options.shard.count == 1:
        return
    for option, is_set, reason in (
        ("-f", options.manifest is not None, "all shards send to one running service"),
        ("--gate", options.gate, "the verdict is that of the merged run: replay merge --gate"),
    ):
        if is_set:
            raise UsageError(f"replay: {option} and --shard are mutually exclusive: {reason}")
    for option, value, reason in (
        (
            "--start-at or --arm",
            options.start_at_ns or options.arm,
            "all shards start at the same instant",
        ),
        ("--salt", options.salt, "equal prefixes are equal prompts in every shard"),
    ):
        if value is None and not options.dry_run:
            raise UsageError(f"replay: --shard needs {option}: {reason}")


def _check_arm(options: ReplayOptions) -> None:
    """Reject options with which a run does not wait for a start."""
    if options.arm is None:
        return
    for option, is_set, reason in (
        ("--start-at", options.start_at_ns is not None, "both determine the start"),
        ("--emulate", options.emulate is not None, "no request is sent"),
    ):
        if is_set:
            raise UsageError(f"replay: {option} and --arm are mutually exclusive: {reason}")


def _check_causal(options: ReplayOptions) -> None:
    """With causal sessions, reject options that need all times before the run, or no sessions."""
    if not options.causal:
        return
    for option, is_set, reason in (
        (
            "--concurrency",
            options.concurrency is not None,
            "clients send when they are free; remove one of them",
        ),
        (
            "--max-rate",
            options.max_rate is not None,
            "the times of requests depend on the responses; limit the starts with --rate-scale",
        ),
        (
            "--rate",
            options.load is not None,
            "a load without a trace has no sessions; give --trace",
        ),
    ):
        if is_set:
            raise UsageError(
                f"replay: {option} and --sessions causal are mutually exclusive: {reason}"
            )


def _check_dependent(options: ReplayOptions) -> None:
    if options.ui_port is not None and not options.ui:
        raise UsageError("replay: --ui-port is only supported with --ui")
    if options.recorded_revision is not None and options.check_recorded is None:
        raise UsageError("replay: --recorded-revision is only supported with --check-recorded")


def _check_emulation(options: ReplayOptions) -> None:
    """Reject options that have no effect in virtual time, such as those about sending."""
    for option, is_set, reason in (
        ("--target", bool(options.targets), "choose one of them"),
        ("-f", options.manifest is not None, "choose one of them"),
        ("--slo", options.slo is not None, "the manifest's spec.slo applies"),
        ("--abort-on", options.abort_on is not None, "no target is under load"),
        ("--ui", options.ui, "the run takes seconds; open its report.html"),
        ("--scrape", bool(options.scrape), "no server runs"),
        ("--prometheus", options.prometheus is not None, "the run takes seconds"),
        ("--header", bool(options.headers), "no request is sent"),
        ("--api-key-env", options.api_key_env is not None, "no request is sent"),
        (
            "--model",
            bool(options.models) or options.model is not None,
            "every request uses the manifest's model",
        ),
        ("--retries", options.retries > 0, "no request is sent"),
        ("--workers", options.workers is not None, "no request is sent"),
        ("--shard", options.shard.count > 1, "no request is sent"),
        ("--start-at", options.start_at_ns is not None, "no request is sent"),
        ("--timeout CLASS=TIME", bool(options.class_timeouts_ns), "one --timeout TIME applies"),
        ("--ca-file", options.ca_file is not None, "no request is sent"),
        ("--check-baseline", options.check_baseline is not None, "the run takes seconds"),
        ("--check-recorded", options.check_recorded is not None, "the run takes seconds"),
        ("--yes", options.yes, "no target is under load"),
        ("--no-probe", not options.probe, "no request is sent"),
        ("--endpoint", options.endpoint is not Endpoint.COMPLETIONS, "no request is sent"),
        ("--tokenizer", options.tokenizer is not None, "prompts have no text"),
        ("--prompt text", options.prompt is not PromptKind.TOKEN_IDS, "prompts have no text"),
        ("--salt", options.salt is not None, "prompts have no text"),
        (
            "--length-pinning",
            options.pinning not in {None, LengthPinning.HEADER},
            "only the executor receives true lengths",
        ),
    ):
        if is_set:
            raise UsageError(f"replay: {option} and --emulate are mutually exclusive: {reason}")
