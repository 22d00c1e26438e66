"""The arguments of `replay`: parser, checks of their combinations, and the parsed options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser, argument_type
from goodput_core.errors import UsageError
from goodput_core.slo.targets import parse_objective
from goodput_core.units import NS_PER_S, parse_duration, parse_size
from goodput_replay.run.summary import LengthPinning
from goodput_replay.sending.abort import AbortRule, parse_abort_rule
from goodput_replay.sending.target import Endpoint, Target, parse_header, parse_target
from goodput_traces.transforms import (
    ClassRule,
    Window,
    parse_class_rules,
    parse_factor,
    parse_window,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReplayOptions", "make_parser", "parse_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of one `replay` command; `--help` describes those not listed here.

    Args:
        trace: a file, or `sample`.
        max_decoded_bytes: decoded size at which reading the trace stops; None for the default.
        target: a running server; None to start `manifest`, or to send nothing.
        manifest: the service to start and stop around the run.
        emulate: the service to emulate in virtual time, in place of a target.
        slo: file with the SLO classes, for a bare target.
        probe: send one probe request per class before the run.
        model: served model for rows that `models` does not map.
        models: served model by the trace's name.
        pinning: how answers get the trace's length; None to ask the target.
        timeout_ns: time limit of a request from its scheduled arrival.
        salt: separates this run's prompts from others; None to draw one at random.
        out: the run's folder; None for a new one in `runs/`.
        gate: exit by the verdict.
        gaps: keep every gap between tokens.
        confidence: one-sided, of each bound.
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
        max_decoded_bytes=given.max_decoded_size,
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
        probe=not given.no_probe,
        model=plain[0] if plain else None,
        models=models,
        headers=dict(given.header),
        api_key_env=given.api_key_env,
        endpoint=Endpoint(given.endpoint),
        pinning=_pinning(given.length_pinning),
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
    """Refuse options about sending: in virtual time nothing is sent."""
    for option, asked, why in (
        ("--target", given.target is not None, "a run is sent to a target or emulated"),
        ("-f", given.file is not None, "a service is started or emulated"),
        ("--slo", given.slo is not None, "the manifest's spec.slo holds"),
        ("--abort-on", given.abort_on is not None, "there is no target to be spared"),
        ("--header", bool(given.header), "nothing is sent"),
        ("--api-key-env", given.api_key_env is not None, "nothing is sent"),
        ("--model", bool(given.model), "every row goes to the manifest's model"),
        ("--yes", given.yes, "no machine is loaded"),
        ("--no-probe", given.no_probe, "nothing is sent"),
        ("--endpoint", given.endpoint != Endpoint.COMPLETIONS, "nothing is sent"),
        ("--salt", given.salt is not None, "prompts have no text"),
        (
            "--length-pinning",
            given.length_pinning not in {"auto", "header"},
            "true lengths are the executor's alone",
        ),
    ):
        if asked:
            raise UsageError(f"replay: {option} and --emulate exclude each other: {why}")


def _pinning(text: str) -> LengthPinning | None:
    return None if text == "auto" else LengthPinning(text.replace("-", "_"))


def _class_rules(texts: Sequence[str]) -> tuple[ClassRule, ...]:
    try:
        return parse_class_rules(texts)
    except ValueError as error:
        raise UsageError(f"replay: --class-by: {error}") from error


_TIMEOUT: Final = "10m"
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_EXAMPLES: Final = (
    "replay --trace sample -f examples/chat.yaml",
    "replay --trace prod.parquet --target http://127.0.0.1:8000 --slo examples/slo.yaml",
    "replay --trace prod.parquet --dry-run --rate-scale 2",
    "replay --trace prod.parquet --target https://llm.example.org --yes --api-key-env LLM_KEY",
    "replay --trace prod.parquet -f examples/chat.yaml --gate --warmup 50 --out runs/candidate",
    "replay --trace prod.parquet --emulate examples/chat.yaml",
    "replay --trace prod.parquet --emulate examples/chat.yaml --topology examples/two-pools.yaml",
    "replay --trace prod.parquet --emulate examples/qwen.yaml --device llama-3-8b-h200",
    "replay report runs/candidate",
    "replay capacity --trace prod.parquet --emulate examples/chat.yaml",
)


def make_parser() -> CommandParser:
    """Build the parser of `replay`."""
    parser = CommandParser(
        "replay",
        summary="Fire a trace at a service at its real timestamps, or at a model of it in "
        "virtual time, and judge every request. `replay report DIR` rebuilds a run's report; "
        "`replay capacity` finds the highest rate that holds.",
        usage="replay --trace TRACE (--target URL | -f MANIFEST | --emulate MANIFEST) "
        "[OPTION ...]\n"
        "       replay report DIR\n"
        "       replay capacity --trace TRACE … [OPTION ...]",
        examples=_EXAMPLES,
    )
    _add_what(parser)
    _add_transforms(parser)
    _add_sending(parser)
    _add_judging(parser)
    return parser


def _add_what(parser: CommandParser) -> None:
    group = parser.add_argument_group("what and where")
    group.add_argument("--trace", required=True, help="a trace (Parquet), or `sample`")
    group.add_argument(
        "--target",
        metavar="URL",
        type=argument_type(parse_target, "URL"),
        help="a running server with OpenAI's API",
    )
    group.add_argument(
        "-f",
        "--file",
        metavar="MANIFEST",
        type=Path,
        help="an LLMService: start it here, replay, stop it",
    )
    group.add_argument(
        "--emulate",
        metavar="MANIFEST",
        type=Path,
        help="an LLMService: its scheduler and placement in virtual time, far faster than the "
        "clock; nothing is sent",
    )
    group.add_argument(
        "--topology",
        metavar="FILE",
        type=Path,
        help="with --emulate: replicas that prefill and others that decode, or requests that move "
        "between replicas while they decode",
    )
    group.add_argument(
        "--oracle",
        action="store_true",
        help="with --emulate: the shortest answer first by true lengths, whatever the policy: a "
        "bound that no server reaches",
    )
    group.add_argument(
        "--device",
        metavar="PROFILE",
        help="with -f and --emulate: emulate this device in place of the manifest's model.source",
    )
    group.add_argument(
        "--model",
        metavar="[TRACE=]SERVED",
        action="append",
        default=[],
        type=argument_type(_model, "MODEL"),
        help="the model to ask for, or a mapping from the trace's name; repeatable "
        "(default: the one model that is served)",
    )
    group.add_argument(
        "--header",
        metavar="NAME:VALUE",
        action="append",
        default=[],
        type=argument_type(parse_header, "HEADER"),
        help="send this with every request; repeatable",
    )
    group.add_argument(
        "--api-key-env",
        metavar="NAME",
        type=argument_type(_env_name, "NAME"),
        help="environment variable that holds the bearer token",
    )
    group.add_argument(
        "--endpoint",
        choices=[e.value for e in Endpoint],
        default="completions",
        help="completions sends token ids, exact on every server; chat sends text "
        "(default: completions)",
    )
    group.add_argument(
        "--no-probe",
        action="store_true",
        help="skip the probe request of each class, which finds a wrong model, key or parameter",
    )
    group.add_argument("--yes", action="store_true", help="the target may be another machine")


def _add_transforms(parser: CommandParser) -> None:
    group = parser.add_argument_group("which part of the trace")
    group.add_argument(
        "--window",
        metavar="FROM..TO",
        type=argument_type(parse_window, "WINDOW"),
        help="only arrivals in this time since the first, such as 10m..20m",
    )
    group.add_argument(
        "--limit", metavar="N", type=argument_type(_positive, "N"), help="at most N requests"
    )
    group.add_argument(
        "--max-decoded-size",
        metavar="SIZE",
        type=argument_type(parse_size, "SIZE"),
        help="stop when the trace decodes to more, for example 4GiB (default: 256 times the file's "
        "size, at least 256MiB)",
    )
    group.add_argument(
        "--speed",
        metavar="X",
        type=argument_type(parse_factor, "X"),
        default=Fraction(1),
        help="time warp: 2 replays an hour in 30 minutes",
    )
    group.add_argument(
        "--rate-scale",
        metavar="X",
        type=argument_type(parse_factor, "X"),
        default=Fraction(1),
        help="more or fewer requests with bursts preserved: 2 doubles every burst's height",
    )
    group.add_argument(
        "--class-by",
        metavar="RULE",
        action="append",
        default=[],
        help="give rows a class, such as 'batch: input_tokens >= 4000'; the first match wins; "
        "repeatable",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=argument_type(_whole, "N"),
        default=0,
        help="seed of the rows that --rate-scale adds or drops, and of an emulated fleet's random "
        "placement (default: 0)",
    )


def _add_sending(parser: CommandParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument(
        "--dry-run", action="store_true", help="say what would be sent; send nothing"
    )
    group.add_argument(
        "--max-rate",
        metavar="N",
        type=argument_type(_positive, "N"),
        help="refuse if the busiest second of the plan holds more than N requests",
    )
    group.add_argument(
        "--abort-on",
        metavar="RULE",
        type=argument_type(parse_abort_rule, "RULE"),
        help="give up, such as error-rate=5%%/30s (exit 3)",
    )
    group.add_argument(
        "--timeout",
        metavar="TIME",
        type=argument_type(_timeout, "TIME"),
        default=_TIMEOUT,
        help=f"how long a request may take from its scheduled arrival (default: {_TIMEOUT})",
    )
    group.add_argument(
        "--warmup",
        metavar="N",
        type=argument_type(_whole, "N"),
        default=0,
        help="the first N rows are sent and not judged",
    )
    group.add_argument(
        "--length-pinning",
        choices=["auto", "header", "max-tokens", "none"],
        default="auto",
        help="how answers get the trace's length: header (our engine: no policy sees it) or "
        "max-tokens (any server: disclosed to it); auto asks the target",
    )
    group.add_argument(
        "--salt",
        metavar="TEXT",
        type=argument_type(_salt, "TEXT"),
        help="make prompts equal to those of another run with this salt (default: random, so "
        "that no run finds another's prefix cache)",
    )


def _add_judging(parser: CommandParser) -> None:
    group = parser.add_argument_group("judging and results")
    group.add_argument(
        "--slo", metavar="FILE", type=Path, help="promises for --target: a manifest or its spec.slo"
    )
    group.add_argument(
        "--gate",
        action="store_true",
        help="exit 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 INVALID (without it: 0 valid, 3 invalid)",
    )
    group.add_argument(
        "--confidence",
        metavar="PERCENT",
        type=argument_type(parse_objective, "PERCENT"),
        default=Fraction(95, 100),
        help="one-sided confidence of a verdict (default: 95%%)",
    )
    group.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        type=Path,
        help="the run's folder (default: a new one in runs/)",
    )
    group.add_argument("--force", action="store_true", help="replace an earlier run in --out")
    group.add_argument("--json", action="store_true", help="print the summary as JSON")
    group.add_argument(
        "--no-gaps", action="store_true", help="keep no gaps between tokens, for very long runs"
    )
    group.add_argument("--no-report", action="store_true", help="write no report.html")


def _bounded(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < least:
        raise ValueError(f"{text!r} is not a whole number from {least}")
    return int(text)


def _positive(text: str) -> int:
    return _bounded(text, 1)


def _whole(text: str) -> int:
    return _bounded(text, 0)


def _timeout(text: str) -> int:
    ns = parse_duration(text)
    if not NS_PER_S // 10 <= ns <= 86_400 * NS_PER_S:
        raise ValueError(f"{text!r} is out of bounds; a timeout lies between 100ms and 1d")
    return ns


def _model(text: str) -> str:
    if not text.strip() or text.endswith("=") or len(text) > 512:
        raise ValueError(f"{text!r} is not a model; write SERVED or TRACE=SERVED")
    return text


def _env_name(text: str) -> str:
    if not _ENV_NAME.fullmatch(text):
        # What stands here may be the key itself: it is not repeated.
        raise ValueError("not the name of a variable; put the key into one and name that")
    return text


def _salt(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", text):
        raise ValueError(f"{text!r} is not a salt; use up to 64 letters, digits, - and _")
    return text
