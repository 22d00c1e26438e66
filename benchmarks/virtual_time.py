"""Speed of a fleet in virtual time: simulated requests and steps per second of one core.

    python benchmarks/virtual_time.py --trace azure.parquet
    python benchmarks/virtual_time.py --trace azure.parquet --json

Four replicas of the profile llama-3-8b-h100 serve examples/chat.yaml with least-loaded placement.
Each row runs in a separate process:

- *library*: requests to records with token times, in memory.
- *no fast-forward*: the same, one step at a time.
- *twice*: the trace twice in a row, to show that memory does not grow.
- *command*: all of `replay --emulate`, from reading the trace to the verdict, with the report; and
  without gaps and report.

Seconds are CPU time, and rates are per CPU second. *Events* are engine calls, for submissions and
for steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from goodput_core.dispatch import run_command
from goodput_core.units import NS_PER_S
from goodput_engine.manifest_file import read_manifest
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.plan import RequestPlan
from goodput_replay.runs.slo import slo_classes
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import trace_path
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_replay.plan import PlannedRequest

MANIFEST = Path(__file__).parents[1] / "examples" / "chat.yaml"
REPLICAS = 4
ROWS = ("library", "no fast-forward", "twice", "command", "command, no gaps, no report")


def library(trace: str, policy: str, *, fast_forward: bool, times: int) -> dict[str, object]:
    service = read_manifest(MANIFEST)
    settings = fleet_settings(
        service,
        device=None,
        source=str(MANIFEST),
        timeout_ns=600 * NS_PER_S,
    )
    settings = replace(
        settings,
        replicas=REPLICAS,
        fast_forward=fast_forward,
        configure=msgspec.structs.replace(settings.configure, policy=policy),
    )
    opened = open_trace(trace_path(trace))
    plan = RequestPlan(
        trace=opened,
        transforms=TransformPlan(first_ns=opened.first_ns),
        slo=slo_classes(service.spec.slo),
    )
    start = time.process_time()
    outcome = emulate(_repeated(plan, times), settings, lambda *_: None)
    cpu_s = time.process_time() - start
    return {
        "requests": outcome.requests,
        "seconds": round(cpu_s, 2),
        "requests_per_s": round(outcome.requests / cpu_s),
        "steps_per_s": round(outcome.steps / cpu_s),
        "steps_per_request": round(outcome.steps / outcome.requests, 1),
        "events_per_request": round(outcome.events / outcome.requests, 1),
    }


def _repeated(plan: RequestPlan, times: int) -> Iterator[PlannedRequest]:
    length_ns = plan.trace.last_ns - plan.trace.first_ns + NS_PER_S
    for number in range(times):
        for request in plan.requests():
            yield replace(
                request,
                request_id=f"{number}-{request.request_id}",
                scheduled_ns=request.scheduled_ns + number * length_ns,
            )


def command(trace: str, policy: str, extra: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder, "chat.yaml")
        text = MANIFEST.read_text().replace("policy: sarathi", f"policy: {policy}")
        manifest.write_text(text.replace("replicas: 2", f"replicas: {REPLICAS}"))
        arguments = ["replay", "--trace", trace, "--emulate", str(manifest), "--json"]
        output = io.StringIO()
        start = time.process_time()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            code = run_command([*arguments, "--out", f"{folder}/run", *extra])
        cpu_s = time.process_time() - start
    assert code == 0, code
    requests = json.loads(output.getvalue())["overall"]["requests"]
    return {
        "requests": requests,
        "seconds": round(cpu_s, 2),
        "requests_per_s": round(requests / cpu_s),
    }


def measure(row: str, trace: str, policy: str) -> dict[str, object]:
    if row == "command":
        found = command(trace, policy, [])
    elif row.startswith("command"):
        found = command(trace, policy, ["--no-gaps", "--no-report"])
    else:
        found = library(
            trace, policy, fast_forward=row != "no fast-forward", times=2 if row == "twice" else 1
        )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"row": row, **found, "peak_mib": round(peak_mib)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="sample", help="a trace (default: sample)")
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="for `make bench`: the sample trace")
    parser.add_argument("--only", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(measure(args.only, args.trace, args.policy)))
        return
    rows = []
    for row in ROWS:
        child = [sys.executable, __file__, "--only", row, "--policy", args.policy]
        child += ["--trace", "sample" if args.quick else args.trace]
        output = subprocess.run(child, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output))
        if not args.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
