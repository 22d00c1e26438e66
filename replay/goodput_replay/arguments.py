"""Arguments of `replay`: the parser of all options."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Final

from goodput_core.cli import CommandParser, argument_type, parse_port
from goodput_core.slo.targets import USUAL_CONFIDENCE, parse_objective
from goodput_core.spec.choices import Endpoint, PromptEncoding
from goodput_core.units import NS_PER_S, parse_size
from goodput_replay.compare.builds import add_recorded_revision
from goodput_replay.load_options import add_load
from goodput_replay.option_values import (
    at_least,
    parse_concurrency,
    parse_env_name,
    parse_listen_address,
    parse_metric_name,
    parse_model,
    parse_outage,
    parse_retries,
    parse_salt,
    parse_timeout,
    parse_workers,
)
from goodput_replay.result_options import add_result_file, add_upload
from goodput_replay.sending.abort import parse_abort_rule
from goodput_replay.sending.target import parse_header, parse_page_url, parse_target
from goodput_replay.shares import ALL, parse_shard
from goodput_replay.slo_options import add_confidence, parse_slo_class, parse_target_ms
from goodput_replay.start_time import parse_instant
from goodput_traces.transforms import parse_factor, parse_session_arrivals, parse_window

__all__ = ["DEFAULT_TIMEOUT_NS", "make_parser"]


DEFAULT_TIMEOUT_NS: Final = 600 * NS_PER_S
_EXAMPLES: Final = (
    "replay --trace sample -f examples/chat.yaml",
    "replay --trace prod.parquet --target http://127.0.0.1:8000 --slo examples/slo.yaml",
    "replay --trace prod.parquet --target http://127.0.0.1 --ttft 1s --tpot 50ms --objective 99%",
    "replay --rate 5/s --duration 5m --input-tokens 500 --output-tokens 200 -f examples/chat.yaml",
    "replay --trace prod.parquet --target http://127.0.0.1:8000 --slo examples/slo.yaml --ui",
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
        summary="Replay a trace against a service at its original timestamps, or emulate the "
        "service in virtual time, and judge every request against its SLO.\n\nOther commands, each "
        "with its own --help:\n"
        "  ab        replay a trace against two builds in pairs of runs, and judge the second\n"
        "  gate      judge a build by its recorded runs\n"
        "  compare   show where runs differ\n"
        "  merge     join the shards of one run\n"
        "  report    write a run's page again\n"
        "  export    write a run's records as CSV\n"
        "  watch     show a running service on a live page\n"
        "  capacity  find the highest rate that meets the SLO",
        usage="replay (--trace TRACE | --rate RATE ...) "
        "(--target URL | -f MANIFEST | --emulate MANIFEST)\n"
        "              [OPTION ...]\n"
        "       replay {ab,gate,compare,merge,report,export,watch,capacity} ...",
        examples=_EXAMPLES,
    )
    _add_input(parser)
    add_load(parser)
    _add_transforms(parser)
    _add_sending(parser)
    _add_judging(parser)
    return parser


def _add_input(parser: CommandParser) -> None:
    group = parser.add_argument_group("input and target")
    group.add_argument(
        "--trace",
        help="trace file (Parquet), `sample`, or an object such as s3://BUCKET/PATH or "
        "gs://BUCKET/PATH, which is copied first",
    )
    group.add_argument(
        "--target",
        dest="targets",
        metavar="URL",
        action="append",
        default=[],
        type=argument_type(parse_target, "URL"),
        help="URL of a running server with an OpenAI-compatible API; repeatable: each request is "
        "sent to the next one",
    )
    group.add_argument(
        "-f",
        "--file",
        dest="manifest",
        metavar="MANIFEST",
        type=Path,
        help="LLMService manifest: start the service locally, replay, and stop it",
    )
    group.add_argument(
        "--emulate",
        metavar="MANIFEST",
        type=Path,
        help="LLMService manifest: run its scheduler and placement in virtual time, without "
        "sending requests",
    )
    group.add_argument(
        "--topology",
        metavar="FILE",
        type=Path,
        help="with --emulate: separate prefill and decode replicas, or live migration of "
        "decoding requests",
    )
    group.add_argument(
        "--oracle",
        action="store_true",
        help="with --emulate: schedule by true output length, shortest first, in place of the "
        "policy; an upper bound that no real server reaches",
    )
    group.add_argument(
        "--device",
        metavar="PROFILE",
        help="with -f and --emulate: device profile to emulate, in place of the manifest's "
        "model.source",
    )
    group.add_argument(
        "--model-path",
        metavar="PATH",
        help="with -f: folder or GGUF file of the model to serve, in place of the manifest's "
        "model.source",
    )
    group.add_argument(
        "--model",
        metavar="[TRACE=]SERVED",
        action="append",
        default=[],
        type=argument_type(parse_model, "MODEL"),
        help="model name to send, or a mapping from the trace's model name; repeatable "
        "(default: the only served model)",
    )
    group.add_argument(
        "--header",
        dest="headers",
        metavar="NAME:VALUE",
        action="append",
        default=[],
        type=argument_type(parse_header, "HEADER"),
        help="header to send with every request; repeatable",
    )
    group.add_argument(
        "--api-key-env",
        metavar="NAME",
        type=argument_type(parse_env_name, "NAME"),
        help="environment variable that holds the bearer token",
    )
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        type=Path,
        help="certificates (PEM) to trust for https targets, in place of the system's",
    )
    group.add_argument(
        "--endpoint",
        choices=[e.value for e in Endpoint],
        default="completions",
        help="API to call (default: completions)",
    )
    group.add_argument(
        "--prompt",
        choices=[form.value for form in PromptEncoding],
        help="tokens sends token ids, whose number is exact on every server that accepts them; "
        "text sends words, whose number of tokens is exact with --tokenizer (default: tokens for "
        "completions without --tokenizer, otherwise text)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer of the served model, from whose words prompts of an exact length are made: "
        "a tokenizer.json, its folder, or the name of a model in the Hugging Face cache; nothing "
        "is downloaded",
    )
    group.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="skip the probe request per class, which detects a wrong model, key or parameter",
    )
    group.add_argument("--yes", action="store_true", help="allow a target on another machine")


def _add_transforms(parser: CommandParser) -> None:
    group = parser.add_argument_group("trace selection")
    group.add_argument(
        "--window",
        metavar="FROM..TO",
        type=argument_type(parse_window, "WINDOW"),
        help="replay only arrivals in this range of time since the first arrival, such as 10m..20m",
    )
    group.add_argument(
        "--session-arrivals",
        metavar="PROCESS",
        type=argument_type(parse_session_arrivals, "PROCESS"),
        help="for a trace whose sessions share no clock: when sessions start, such as "
        "poisson:0.2/s",
    )
    group.add_argument("--limit", metavar="N", type=at_least(1), help="replay at most N requests")
    group.add_argument(
        "--max-decoded-size",
        dest="max_decoded_bytes",
        metavar="SIZE",
        type=argument_type(parse_size, "SIZE"),
        help="maximum decoded size of the trace, such as 4GiB (default: 256 times the file size, "
        "at least 256MiB)",
    )
    group.add_argument(
        "--speed",
        metavar="X",
        type=argument_type(parse_factor, "X"),
        default=Fraction(1),
        help="speed factor: 2 replays an hour in 30 minutes",
    )
    group.add_argument(
        "--rate-scale",
        metavar="X",
        type=argument_type(parse_factor, "X"),
        default=Fraction(1),
        help="rate factor that preserves bursts: 2 doubles the number of requests",
    )
    group.add_argument(
        "--class-by",
        dest="class_rule_texts",
        metavar="RULE",
        action="append",
        default=[],
        help="assign an SLO class, such as 'batch: input_tokens >= 4000'; the first matching rule "
        "applies; repeatable",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=at_least(0),
        default=0,
        help="seed of a load, rate scaling, session starts and an emulated fleet's random "
        "placement (default: 0)",
    )


def _add_sending(parser: CommandParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument(
        "--concurrency",
        metavar="N",
        type=argument_type(parse_concurrency, "N"),
        help="send in a closed loop instead of at the times of the trace: each of N clients sends "
        "its next request when its response has ended; measures throughput and gets no verdict",
    )
    group.add_argument(
        "--workers",
        metavar="N",
        type=argument_type(parse_workers, "N"),
        help="number of processes that send, each of them complete sessions (default: one, or more "
        "if the busiest second of the plan needs them and the machine has the processors)",
    )
    group.add_argument(
        "--shard",
        metavar="I/N",
        type=argument_type(parse_shard, "SHARD"),
        default=ALL,
        help="send only the I-th of N shares of the trace, each with complete sessions; every "
        "machine sends another one, with the same --start-at and --salt; I is `job` in a pod of an "
        "Indexed Job; see replay merge",
    )
    group.add_argument(
        "--start-at",
        dest="start_at_ns",
        metavar="INSTANT",
        type=argument_type(parse_instant, "INSTANT"),
        help="start of the run, such as 2026-03-04T05:06:07Z or seconds since 1970 (default: when "
        "everything is ready)",
    )
    group.add_argument(
        "--arm",
        metavar="[ADDRESS:]PORT",
        type=argument_type(parse_listen_address, "PORT"),
        help="prepare everything, then wait until POST /replay/start on this port names the start; "
        "the environment variable GOODPUT_CONTROL_TOKEN holds the token of the sender (default "
        "address: 127.0.0.1)",
    )
    group.add_argument(
        "--sessions",
        choices=["independent", "causal"],
        default="independent",
        help="independent sends every request at its time in the trace; causal sends a request "
        "of a session after the one before it has ended, plus the recorded think time (default: "
        "independent)",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the plan without sending requests"
    )
    group.add_argument(
        "--test-target",
        action="store_true",
        help="with --dry-run: also send the target one probe request per class, as before a run",
    )
    group.add_argument(
        "--max-rate",
        metavar="N",
        type=at_least(1),
        help="reject a plan with more than N requests in any second",
    )
    group.add_argument(
        "--abort-on",
        metavar="RULE",
        type=argument_type(parse_abort_rule, "RULE"),
        help="abort the run when RULE holds, such as error-rate=5%%/30s (exit 3)",
    )
    group.add_argument(
        "--timeout",
        dest="timeouts",
        metavar="[CLASS=]TIME",
        action="append",
        default=[],
        type=argument_type(parse_timeout, "TIME"),
        help="time limit of a request from its scheduled arrival, or of the requests of one class; "
        "repeatable (default: 10m)",
    )
    group.add_argument(
        "--retries",
        metavar="N",
        type=argument_type(parse_retries, "N"),
        default=0,
        help="send a request that failed before its first token up to N more times; its latencies "
        "count from its scheduled arrival (default: 0)",
    )
    group.add_argument(
        "--warmup",
        metavar="N",
        type=at_least(0),
        default=0,
        help="send and record the first N requests, but do not judge them",
    )
    group.add_argument(
        "--length-pinning",
        dest="pinning",
        choices=["auto", "header", "max-tokens", "limit", "none"],
        default="auto",
        help="how to pin output lengths: header (Goodput only, hidden from its policies), "
        "max-tokens (visible to the server's scheduler), or limit (the same without min_tokens and "
        "ignore_eos, so outputs may be shorter); auto selects by target",
    )
    group.add_argument(
        "--salt",
        metavar="TEXT",
        type=argument_type(parse_salt, "TEXT"),
        help="salt of the prompts; runs with equal salts send equal prompts (default: random, so "
        "that no run hits another run's prefix cache)",
    )


def _add_judging(parser: CommandParser) -> None:
    group = parser.add_argument_group("judging and results")
    group.add_argument(
        "--slo",
        metavar="FILE",
        type=Path,
        help="SLO targets for --target: a manifest or its spec.slo",
    )
    for option, metavar, what in (
        ("--ttft", "TIME", "time to first token"),
        ("--tpot", "TIME", "time per output token"),
        ("--tbt-p99", "TIME", "p99 of the gaps between a request's tokens"),
        ("--e2e", "TIME", "time to the end of the response"),
    ):
        group.add_argument(
            option,
            dest=f"{option[2:].replace('-', '_')}_ms",
            metavar=metavar,
            type=argument_type(parse_target_ms, metavar),
            help=f"target of the {what} for every request, instead of --slo",
        )
    group.add_argument(
        "--objective",
        metavar="PERCENT",
        type=argument_type(parse_objective, "PERCENT"),
        help="share of all requests that must meet --ttft, --tpot and the like, such as 99%%",
    )
    group.add_argument(
        "--slo-class",
        dest="slo_classes",
        metavar="CLASS",
        action="append",
        default=[],
        type=argument_type(parse_slo_class, "CLASS"),
        help="targets of one class of the trace, such as "
        "chat:ttft=500ms,tpot=50ms,objective=99%%; repeatable",
    )
    group.add_argument(
        "--outage",
        dest="outage_s",
        metavar="TIME",
        type=argument_type(parse_outage, "TIME"),
        help="with --ttft and --slo-class: length of an outage that a PASS must exclude",
    )
    group.add_argument(
        "--gate",
        action="store_true",
        help="exit 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 INVALID (without it: 0 valid, 3 invalid)",
    )
    group.add_argument(
        "--check-baseline",
        metavar="RUN",
        help="check before the first request that `replay gate --baseline RUN` can compare the run",
    )
    group.add_argument(
        "--check-recorded",
        metavar="DIR",
        help="check before the first request that `replay gate --recorded DIR` can compare the run",
    )
    add_recorded_revision(group)
    add_confidence(group, "a verdict", default=USUAL_CONFIDENCE)
    group.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        type=Path,
        help="run folder (default: a new one in runs/)",
    )
    group.add_argument("--force", action="store_true", help="replace the existing run in --out")
    add_upload(group, "the run folder")
    add_result_file(group)
    group.add_argument("--json", action="store_true", help="print the summary as JSON")
    group.add_argument(
        "--no-gaps",
        dest="gaps",
        action="store_false",
        help="record only the p99 of each request's gaps between tokens; for very long runs",
    )
    group.add_argument(
        "--ui",
        action="store_true",
        help="serve a live page of the run on this machine, and print its address",
    )
    group.add_argument(
        "--ui-port",
        metavar="N",
        type=argument_type(parse_port, "PORT"),
        help="port of --ui (default: any free one)",
    )
    group.add_argument(
        "--scrape",
        metavar="URL",
        action="append",
        default=[],
        type=argument_type(parse_page_url, "URL"),
        help="metrics page of the target, such as http://127.0.0.1:8000/metrics: its queue, "
        "memory and tokens are drawn beside the results; repeatable (with -f, the engines of the "
        "service are scraped)",
    )
    group.add_argument(
        "--scrape-metric",
        dest="scrape_metrics",
        metavar="NAME",
        action="append",
        default=[],
        type=argument_type(parse_metric_name, "NAME"),
        help="also record this metric of the scraped pages; repeatable",
    )
    group.add_argument(
        "--scrape-key-env",
        metavar="NAME",
        type=argument_type(parse_env_name, "NAME"),
        help="environment variable that holds the bearer token for --scrape",
    )
    group.add_argument(
        "--no-scrape",
        dest="scrape_service",
        action="store_false",
        help="with -f: do not scrape the engines of the service",
    )
    group.add_argument(
        "--prometheus",
        metavar="[ADDRESS:]PORT",
        type=argument_type(parse_listen_address, "PORT"),
        help="serve the metrics of the run for a Prometheus server (default address: 127.0.0.1)",
    )
    group.add_argument(
        "--no-report", dest="report", action="store_false", help="do not write report.html"
    )
