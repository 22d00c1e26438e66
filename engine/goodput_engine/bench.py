"""`goodput engine bench`: throughput and latency of a real model, without HTTP.

Requests of equal lengths are submitted together to the scheduler and the executor that
`goodput engine` uses, and steps are taken until all have ended. The steps that only decode and
those that only compute prompts are compared with the least time that the machine needs for them.
Other work on the machine slows both the steps and the measurement of its limits. The limits are
therefore measured before and after each batch, and the highest values count for all batches.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs
from rich.console import Console
from rich.table import Table

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import UsageError
from goodput_core.quantiles import quantiles
from goodput_core.steptime.forms import StepShape
from goodput_core.text import printable
from goodput_core.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_model_core, configuration, load_model
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.server.model_options import add_model_arguments, choose_model
from goodput_engine.weights.fetch import fetch_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.executor.base import LoadedModel
    from goodput_engine.executor.roofline import StepRoofline
    from goodput_engine.messages import Configure, Rejected
    from goodput_engine.scheduler.plan import StepOutcome

__all__ = ["main", "make_parser"]

_MAX_TOKENS: Final = 1_048_576
_MAX_REQUESTS: Final = 10_000
_SHOWN_KINDS: Final = ("decode", "prefill")
_WHOLE_PERCENT: Final = 100
_QUANTILES: Final = (Fraction(1, 2), Fraction(99, 100))


@dataclass(slots=True, kw_only=True)
class _StepTotals:
    """The steps of one kind.

    Attributes:
        tokens: tokens that they computed.
        step_ns: their times together.
        work: shape and number of sampled tokens of each step.
    """

    tokens: int = 0
    step_ns: int = 0
    work: list[tuple[StepShape, int]] = field(default_factory=list)

    def document(self, roofline: StepRoofline) -> dict[str, Any]:
        """Return the phase as JSON; rates are null without a step."""
        least_ns = sum(roofline.least_ns(shape, samples) for shape, samples in self.work)
        return {
            "steps": len(self.work),
            "tokens_per_s": _ratio(self.tokens, self.step_ns / NS_PER_S),
            "step_ms": _ratio(self.step_ns / NS_PER_MS, len(self.work)),
            "roofline_percent": _ratio(100 * least_ns, self.step_ns),
        }


class _Steps:
    """The steps of a measurement, by kind.

    Attributes:
        decode: the steps that only decode.
        prefill: the steps that only compute prompts.
        mixed: the other steps.
    """

    def __init__(self) -> None:
        self.decode, self.prefill, self.mixed = _StepTotals(), _StepTotals(), _StepTotals()

    def add(self, outcome: StepOutcome) -> None:
        """Count a step."""
        shape = outcome.plan.shape
        if not shape.num_tokens:
            return
        phase = self.mixed
        if shape.num_decodes in {0, shape.num_tokens}:
            phase = self.decode if shape.num_decodes else self.prefill
        samples = shape.num_decodes + sum(chunk.samples for chunk in outcome.plan.chunks)
        phase.tokens += shape.num_tokens
        phase.step_ns += outcome.result.step_ns
        phase.work.append((shape, samples))

    def documents(self, roofline: StepRoofline) -> dict[str, Any]:
        """Return all kinds as JSON, compared with a roofline."""
        return {
            "decode": self.decode.document(roofline),
            "prefill": self.prefill.document(roofline),
            "mixed": self.mixed.document(roofline),
        }


def main(argv: list[str]) -> int:
    """Measure a model and print a table.

    Raises:
        GoodputError: the manifest is invalid, names no real model, or the model cannot be served;
            or the manifest permits fewer running requests than the arguments require.
    """
    args = make_parser().parse_args(argv)
    service = read_manifest(args.manifest)
    model = choose_model(args, service.spec, source=str(args.manifest))
    if model is None:
        raise UsageError(
            f"goodput engine bench: {args.manifest} emulates a device; set spec.model.source to "
            "file:// and a model, or try `goodput device show`"
        )
    if model.source is not None:
        configure_logging()
        model = structs.replace(model, path=asyncio.run(fetch_weights(model.source)), source=None)
    config = configuration(
        service.spec.engine, mode=service.spec.control.mode, device=model.path, model=model
    )
    numbers = args.concurrency or sorted({1, min(8, config.max_num_seqs)})
    _require_places(numbers, config.max_num_seqs)
    loaded = load_model(config, model)
    tokens = args.input_tokens + args.output_tokens
    if tokens > loaded.max_model_tokens:
        raise UsageError(
            f"goodput engine bench: --input-tokens and --output-tokens add up to {tokens}, but the "
            f"context of the model has {loaded.max_model_tokens} tokens"
        )
    roofline = loaded.measure_roofline()
    bench = _Bench(config, loaded)
    measured: list[tuple[dict[str, Any], _Steps]] = []
    for concurrency in numbers:
        measured.append(
            bench.measure(
                concurrency, input_tokens=args.input_tokens, output_tokens=args.output_tokens
            )
        )
        roofline = roofline.with_higher_rates(loaded.measure_roofline())
    results = [figures | steps.documents(roofline) for figures, steps in measured]
    if args.json:
        print(json.dumps(_document(loaded, roofline, results), indent=2))  # noqa: T201 - the output
    else:
        _print(loaded, roofline, results)
    return 0


def make_parser() -> CommandParser:
    """Build the parser of `goodput engine bench`."""
    parser = CommandParser(
        prog="goodput engine bench",
        summary="Measure throughput and latency of a real model without HTTP, and compare its "
        "steps with the limits of this machine.",
        examples=(
            "goodput engine bench -f examples/smollm2.yaml",
            "goodput engine bench -f examples/smollm2.yaml --concurrency 1,8,32 --json",
        ),
    )
    parser.add_argument(
        "-f", "--file", required=True, type=Path, metavar="FILE", dest="manifest",
        help="manifest of the LLMService, with spec.model.source: file://…",
    )  # fmt: skip
    tokens = argument_type(lambda text: parse_whole(text, 1, _MAX_TOKENS, "a number"), "number")
    parser.add_argument(
        "--input-tokens", type=tokens, default=128, metavar="N", help="tokens of each prompt (128)"
    )
    parser.add_argument(
        "--output-tokens", type=tokens, default=32, metavar="N", help="tokens of each output (32)"
    )
    parser.add_argument(
        "--concurrency", type=argument_type(_parse_counts, "list"), metavar="N,…",
        help="numbers of requests that run together, one row each (1,8, or as many as the "
        "manifest permits)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_model_arguments(parser, serves=False)
    parser.set_defaults(device=None)
    return parser


def _parse_counts(text: str) -> list[int]:
    return [parse_whole(part, 1, _MAX_REQUESTS, "a number of requests") for part in text.split(",")]


class _Bench:
    """An engine core that runs batches of requests.

    There is one core for all batches, because the executor follows the changes of its plans.
    """

    def __init__(self, config: Configure, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._steps = _Steps()
        self._core = build_model_core(config, loaded, on_step=self._count)
        # A policy that waits for a complete batch starts an incomplete one.
        self._core.scheduler.end_input()
        self._rids = count()

    def measure(
        self, concurrency: int, *, input_tokens: int, output_tokens: int
    ) -> tuple[dict[str, Any], _Steps]:
        """Run requests together until all have ended; return their figures and the steps.

        Raises:
            UsageError: the engine rejects a request.
        """
        core = self._core
        self._steps = steps = _Steps()
        earlier_preemptions = core.scheduler.stats.preemptions
        start_ns = time.monotonic_ns()
        for _ in range(concurrency):
            rejected = core.submit(self._request(start_ns, input_tokens, output_tokens), start_ns)
            _require_admission([] if rejected is None else [rejected])
        first_ns: dict[int, int] = {}
        last_ns: dict[int, int] = {}
        while core.scheduler.has_work:
            outputs = core.step(time.monotonic_ns())
            _require_admission(core.take_rejected())
            if outputs is None:
                continue
            for output in outputs.outputs:
                first_ns.setdefault(output.rid, outputs.at_ns)
                last_ns[output.rid] = outputs.at_ns
        seconds = (max(last_ns.values()) - start_ns) / NS_PER_S
        gaps = output_tokens - 1
        figures = {
            "concurrency": concurrency,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "seconds": round(seconds, 3),
            "output_tokens_per_s": _ratio(concurrency * output_tokens, seconds),
            "ttft_ms": _quantiles(at - start_ns for at in first_ns.values()),
            "tpot_ms": _quantiles((last_ns[rid] - at) // gaps for rid, at in first_ns.items())
            if gaps
            else None,
            "preemptions": core.scheduler.stats.preemptions - earlier_preemptions,
        }
        return figures, steps

    def _count(self, outcome: StepOutcome) -> None:
        self._steps.add(outcome)

    def _request(self, arrival_ns: int, input_tokens: int, output_tokens: int) -> Submit:
        rid = next(self._rids)
        stream = random.Random(rid)
        token_ids = [stream.randrange(self._loaded.vocab_size) for _ in range(input_tokens)]
        return Submit(
            rid=rid,
            arrival_ns=arrival_ns,
            input_tokens=input_tokens,
            max_output_tokens=output_tokens,
            executor=ExecutorInput(token_ids=token_ids, ignore_eos=True),
        )


def _require_places(concurrency: list[int], places: int) -> None:
    if max(concurrency) > places:
        raise UsageError(
            f"goodput engine bench: --concurrency {max(concurrency)} exceeds "
            f"spec.engine.maxNumSeqs, {places}, so fewer requests would run together; raise the "
            "field, or give a lower --concurrency"
        )


def _require_admission(rejected: list[Rejected]) -> None:
    if rejected:
        first = rejected[0]
        options = "--concurrency"
        if first.reason == "too_long":
            options = "--input-tokens or --output-tokens"
        raise UsageError(
            f"goodput engine bench: the engine rejected a request: {first.detail}; give a lower "
            f"{options}"
        )


def _quantiles(times_ns: Iterable[int]) -> dict[str, float]:
    p50, p99 = quantiles(times_ns, _QUANTILES)
    return {"p50": p50 / NS_PER_MS, "p99": p99 / NS_PER_MS}


def _document(
    loaded: LoadedModel, roofline: StepRoofline, results: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": loaded.name,
        **loaded.facts,
        "weight_bytes": roofline.weight_bytes,
        "read_bytes_per_s": round(roofline.bytes_per_s),
        "flops_per_s": round(roofline.flops_per_s),
        "results": results,
    }


def _print(loaded: LoadedModel, roofline: StepRoofline, results: list[dict[str, Any]]) -> None:
    console = Console(markup=False, highlight=False)
    console.print(
        f"{printable(loaded.name)}: {roofline.weight_bytes / BYTES_PER_GIB:.2f} GiB of weights as "
        f"{loaded.facts['dtype']}, {loaded.facts['attention']}; this machine reads "
        f"{roofline.bytes_per_s / 1e9:.1f} GB/s and computes {roofline.flops_per_s / 1e9:,.0f} "
        "GFLOP/s",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (
        "\nrequests",
        "output\ntok/s",
        "TTFT\np50 ms",
        "\np99 ms",
        "TPOT\np50 ms",
        "\np99 ms",
        "decode\nstep ms",
        "% of\nroofline",
        "prefill\ntok/s",
        "% of\nroofline",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        tpot = result["tpot_ms"] or {"p50": None, "p99": None}
        numbers = (
            result["output_tokens_per_s"],
            *result["ttft_ms"].values(),
            *tpot.values(),
            result["decode"]["step_ms"],
            result["decode"]["roofline_percent"],
            result["prefill"]["tokens_per_s"],
            result["prefill"]["roofline_percent"],
        )
        table.add_row(str(result["concurrency"]), *map(_number, numbers))
    console.print(table)
    shares = [result[kind]["roofline_percent"] for result in results for kind in _SHOWN_KINDS]
    if any(share is not None and share > _WHOLE_PERCENT for share in shares):
        console.print(
            "Steps were faster than the roofline: other work slowed every measurement of this "
            "machine's limits. Measure again on an idle machine.",
            soft_wrap=True,
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value < 1_000 else f"{value:,.0f}"


def _ratio(value: float, divisor: float) -> float | None:
    return round(value / divisor, 3) if divisor else None
