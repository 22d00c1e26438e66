"""Cost and accuracy of learning step times, and the cost of a step log.

    python benchmarks/step_time_law.py
    python benchmarks/step_time_law.py --json

The steps of a synthetic load (a changing number of decodes, and a prefill chunk in every third
step) have the times of a device profile, with 3 % noise. The law predicts each step before it
observes it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.quantiles import P50, P95, quantiles
from goodput_core.steptime import OnlineStepTime, StepShape
from goodput_engine.device.load import list_profiles, load_profile
from goodput_engine.device.step_log import StepLog
from goodput_engine.scheduler.plan import StepOutcome, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.steptime import StepTimeForm

NOISE = 0.03
WARM_UP_STEPS = 200


def steps(form: StepTimeForm, count: int) -> Iterator[tuple[StepShape, int]]:
    draw = random.Random(count)
    decodes = 20
    for number in range(count):
        decodes = min(max(1, decodes + draw.choice((-1, 0, 0, 1))), 90)
        context = 800 + 400 * (number // 200 % 5)
        chunks = []
        if draw.random() < 1 / 3:
            chunks = [(draw.choice((0, 0, 512, 4096)), draw.randint(1, 2048 - decodes))]
        shape = StepShape.of(
            decodes=decodes, decode_context_tokens=decodes * context, chunks=chunks
        )
        yield shape, max(1, round(form.step_ns(shape) * draw.gauss(1, NOISE)))


def measure_law(device: str, count: int) -> dict[str, object]:
    law = OnlineStepTime()
    times: list[int] = []
    errors: list[int] = []
    load = list(steps(load_profile(device).form, count))
    cpu_ns = time.process_time_ns()
    for number, (shape, step_ns) in enumerate(load):
        start_ns = time.perf_counter_ns()
        predicted_ns = law.step_ns(shape)
        law.observe(shape, step_ns)
        times.append(time.perf_counter_ns() - start_ns)
        if number >= WARM_UP_STEPS:
            errors.append(abs(predicted_ns - step_ns) * 1_000_000 // step_ns)
    cpu_ns = time.process_time_ns() - cpu_ns
    p50, p95 = quantiles(errors, (P50, P95))
    times.sort()
    return {
        "device": device,
        "steps": count,
        "median_us": times[count // 2] / 1000,
        "p99_us": times[count * 99 // 100] / 1000,
        "mean_cpu_us": round(cpu_ns / count / 1000, 2),
        "p50_error_percent": p50 / 10_000,
        "p95_error_percent": p95 / 10_000,
    }


def measure_log(count: int) -> dict[str, object]:
    outcomes = [
        StepOutcome(
            plan=StepPlan(
                plan_id=number,
                at_ns=number,
                left=(),
                admitted=(),
                joined=(),
                new_blocks=(),
                decode_epoch=number,
                num_decodes=shape.num_decodes,
                chunks=(),
                shape=shape,
            ),
            result=StepResult(plan_id=number, at_ns=number, step_ns=step_ns, stopped={}),
            advanced=[],
            progress=[],
            released=[],
        )
        for number, (shape, step_ns) in enumerate(steps(load_profile("unit").form, count))
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = StepLog(Path(folder) / "steps.parquet")
        times: list[int] = []
        cpu_ns = time.process_time_ns()
        for outcome in outcomes:
            start_ns = time.perf_counter_ns()
            log.add(outcome)
            times.append(time.perf_counter_ns() - start_ns)
        log.close()
        cpu_ns = time.process_time_ns() - cpu_ns
        size = (Path(folder) / "steps.parquet").stat().st_size
    times.sort()
    return {
        "steps": count,
        "median_us": times[count // 2] / 1000,
        "mean_cpu_us": round(cpu_ns / count / 1000, 2),
        "longest_us": times[-1] / 1000,
        "bytes_per_step": round(size / count, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="2,000 steps instead of 20,000")
    args = parser.parse_args()
    count = 2_000 if args.quick else 20_000
    laws = [measure_law(device, count) for device in list_profiles()]
    log = measure_log(count)
    if args.json:
        print(json.dumps({"laws": laws, "log": log}))
        return
    print(
        f"{'device':<22}{'median µs':>10}{'p99 µs':>8}{'CPU µs':>9}{'error p50 %':>13}{'p95 %':>7}"
    )
    for row in laws:
        print(
            f"{row['device']:<22}{row['median_us']:>10.1f}{row['p99_us']:>8.1f}"
            f"{row['mean_cpu_us']:>9.1f}{row['p50_error_percent']:>13.1f}"
            f"{row['p95_error_percent']:>7.1f}"
        )
    print(
        f"step log: median {log['median_us']:.1f} µs per step, "
        f"mean {log['mean_cpu_us']:.1f} of CPU, longest {log['longest_us']:.0f}; "
        f"{log['bytes_per_step']} bytes per step"
    )


if __name__ == "__main__":
    main()
