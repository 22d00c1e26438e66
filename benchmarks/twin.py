"""The emulated twin of a real engine: its predicted latencies beside those of the engine.

An engine computes a real model and logs its steps. The first load is for the fit: `goodput device
fit` makes a profile of the steps that ran meanwhile. Then the held-out minutes follow, in which
another load is replayed to a new engine, several times. The same load is served in virtual time
with the profile. Its latencies are compared with the median of the repeats, beside the largest
difference of a repeat from that median. Only requests that every run completed are compared, and
the others are counted: a request that one run rejects would move the quantiles of all. The aims are
5 % for TBT, 10 % for the median of TTFT, and 20 % for its 99th percentile.

    make smollm2
    python -m benchmarks.twin                              # 42 minutes
    python -m benchmarks.twin --folder runs/twin --parts 1 # one replay of these; call it again
    python -m benchmarks.twin --minutes 1.5 --repeats 2    # six minutes
    python -m benchmarks.twin --quick                      # half a minute, too short for the aims
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from goodput_core.slo.record import Outcome
from goodput_engine.device.load import load_profile
from goodput_replay.runs.record_rows import read_records

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

ROOT = Path(__file__).parent.parent
METRICS: Final = {
    "TTFT p50": ("ttft", 50, 0.10),
    "TTFT p99": ("ttft", 99, 0.20),
    "TBT p50": ("tbt", 50, 0.05),
    "TBT p99": ("tbt", 99, None),
    "TPOT p50": ("tpot", 50, 0.05),
}
"""Latency, percentile and aim of each row."""
FIT_SEED: Final = 1
HELD_OUT_SEED: Final = 2


@dataclass(frozen=True, kw_only=True)
class TwinRow:
    """One quantile of the held-out load.

    Args:
        name: metric and percentile.
        measured_ms: median of the repeats on the engine.
        spread: largest relative difference of a repeat from it; None with one repeat.
        predicted_ms: its value in virtual time.
        aim: largest relative error; None if there is no aim.
    """

    name: str
    measured_ms: float
    spread: float | None
    predicted_ms: float
    aim: float | None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def met(self) -> bool | None:
        """True if the aim is met; None without an aim."""
        return None if self.aim is None else abs(self.error) <= self.aim


@contextmanager
def running_engine(manifest: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Start an engine; yield its addresses and its process, and stop it after the `with` block."""
    command = [sys.executable, "-m", "goodput_core", "engine", "-f", str(manifest)]
    command += ["--port", "0", "--json", "--exit-with-parent", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            line = it.stdout.readline()
            if not line:
                raise SystemExit("the engine did not start")
            yield json.loads(line)
        finally:
            it.terminate()
            it.wait(60)


def replay(where: Path, *arguments: str) -> Path:
    """Run `replay` and return its run folder."""
    command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
    command += ["--out", str(where), "--json", "--no-report"]
    finished = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if finished.returncode not in {0, 3}:  # 3: the run is invalid, as on a busy machine
        raise SystemExit(f"replay ended with {finished.returncode}")
    return where


def completed(run: Path) -> set[str]:
    """Return the ids of the requests that a run completed."""
    return {record.request_id for record in read_records(run) if record.outcome is Outcome.OK}


def latencies_ms(run: Path, ids: Container[str]) -> dict[str, list[float]]:
    """Return TTFT from the send, TPOT and all gaps of these requests."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "tbt": []}
    for record in read_records(run):
        if record.request_id not in ids:
            continue
        if record.ttft_from_send_ns is not None:
            found["ttft"].append(record.ttft_from_send_ns / 1e6)
        if record.tpot_ns is not None:
            found["tpot"].append(record.tpot_ns / 1e6)
        found["tbt"] += [gap / 1e3 for gap in record.gaps_us]
    return found


def replay_to_engine(manifest: Path, folder: Path, name: str, load: Sequence[str]) -> None:
    """Replay a load to a new engine; write its run, its step log and its base profile."""
    folder.mkdir(parents=True, exist_ok=True)
    service = yaml.safe_load(manifest.read_text(encoding="utf-8"))["metadata"]["name"]
    log = folder / f"{name}-steps.parquet"
    with running_engine(manifest, "--step-log", str(log)) as engine:
        write_base(folder / "base.yaml", engine)
        replay(folder / name, *load, "--target", engine["url"], "--model", service)


def write_base(where: Path, engine: dict[str, Any]) -> Path:
    """Write a profile with the memory of an engine, for the numbers that a step log lacks."""
    with urllib.request.urlopen(f"{engine['admin_url']}/control/state") as response:
        state = json.load(response)
    with urllib.request.urlopen(f"{engine['url']}/v1/models") as response:
        (model,) = json.load(response)["data"]
    unit = load_profile("unit")
    numbers = {name: unit.numbers[name] for name in unit.numbers} | {
        "kv_blocks": state["kv_total_blocks"],
        "block_size": state["block_size"],
        "kv_bytes_per_token": state["device"]["kv_bytes_per_token"],
        "max_model_tokens": model["max_model_len"],
    }
    profile = {
        "name": "engine",
        "description": "The memory of an engine.",
        "form": "unit",
        "overlap": "add",
        "numbers": {
            name: {"value": value, "from": "the engine's state"} for name, value in numbers.items()
        },
    }
    where.write_text(yaml.safe_dump(profile), encoding="utf-8")
    return where


def fit(log: Path, base: Path, out: Path) -> dict[str, Any]:
    """Fit the profile, and return the printed result."""
    command = [sys.executable, "-m", "goodput_core", "device", "fit", str(log)]
    command += ["--base", str(base), "--out", str(out), "--form", "piecewise", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(printed)
    return result


def compare(measured: Sequence[Path], predicted: Path, ids: Container[str]) -> list[TwinRow]:
    """Return the quantiles of the repeats and of the prediction, of these requests."""
    repeats = [latencies_ms(run, ids) for run in measured]
    twin = latencies_ms(predicted, ids)
    rows: list[TwinRow] = []
    for name, (kind, percentile, aim) in METRICS.items():
        values = [float(np.percentile(one[kind], percentile)) for one in repeats]
        middle = median(values)
        rows.append(
            TwinRow(
                name=name,
                measured_ms=middle,
                spread=max(abs(one / middle - 1) for one in values) if len(values) > 1 else None,
                predicted_ms=float(np.percentile(twin[kind], percentile)),
                aim=aim,
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine and its twin; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    if find_spec("torch") is None:
        print("not run: torch is missing; `make smollm2` installs it")
        return 0
    if args.quick:
        args.minutes, args.repeats, args.rate = 0.25, 1, "60/m"
    load = ["--rate", args.rate, "--duration", f"{args.minutes * 60:g}s"]
    load += ["--input-tokens", args.input_tokens, "--output-tokens", args.output_tokens]
    held_out = [*load, "--seed", str(HELD_OUT_SEED), "--slo", str(args.manifest)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.folder is None else args.folder
        names = ["fit", *(f"held-out-{number}" for number in range(args.repeats))]
        missing = [name for name in names if not (folder / name).exists()]
        for name in missing[: args.parts]:
            load_of_part = [*load, "--seed", str(FIT_SEED)] if name == "fit" else held_out
            replay_to_engine(args.manifest, folder, name, load_of_part)
        left = [] if args.parts is None else missing[args.parts :]
        if left:
            print(f"left: {', '.join(left)}; call the same command again")
            return 0
        profile = folder / "twin.yaml"
        profile.unlink(missing_ok=True)
        fitted = fit(folder / "fit-steps.parquet", folder / "base.yaml", profile)
        emulated = ["--emulate", str(args.manifest), "--device", str(profile), "--force"]
        predicted = replay(folder / "twin", *held_out[:-2], *emulated)
        measured = [folder / name for name in names[1:]]
        sets = {run.name: completed(run) for run in (*measured, predicted)}
        ids = set.intersection(*sets.values())
        rows = compare(measured, predicted, ids)
        requests = sum(1 for _ in read_records(predicted))
        if args.keep is not None:
            args.keep.write_bytes(profile.read_bytes())
    rejected = {name: requests - len(one) for name, one in sets.items()}
    missed = [row.name for row in rows if row.met is False]
    if args.json:
        result = [asdict(row) | {"error": row.error, "met": row.met} for row in rows]
        counts = {"requests": requests, "compared": len(ids), "not_completed": rejected}
        print(json.dumps({"fit": fitted, **counts, "rows": result}))
    else:
        print(
            f"{fitted['steps']:,} steps fitted, off by {fitted['p50_error']:.1%} (p50) and "
            f"{fitted['p95_error']:.1%} (p95); {args.repeats} × {requests} held-out requests, of "
            f"which {len(ids)} are compared; not completed: "
            f"{', '.join(f'{count} in {name}' for name, count in rejected.items())}"
        )
        print("| metric | engine, ms | spread of repeats | twin, ms | error | aim | met |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
        for row in rows:
            spread = "–" if row.spread is None else f"{row.spread:.1%}"
            aim = "–" if row.aim is None else f"{row.aim:.0%}"
            met = {None: "–", True: "yes", False: "no"}[row.met]
            print(
                f"| {row.name} | {row.measured_ms:,.1f} | {spread} | {row.predicted_ms:,.1f} "
                f"| {row.error:+.1%} | {aim} | {met} |"
            )
    return int(bool(missed) and not args.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/smollm2.yaml")
    parser.add_argument("--rate", default="24/m", help="of the load (%(default)s)")
    parser.add_argument("--input-tokens", default="64~60%", help="(64~60%%)")
    parser.add_argument("--output-tokens", default="24~60%", help="(24~60%%)")
    parser.add_argument(
        "--minutes", type=float, default=10, help="length of each replay (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="held-out replays (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep all runs here, and do not repeat them"
    )
    parser.add_argument("--parts", type=int, metavar="N", help="replay at most N of the loads")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="copy the profile to this file")
    parser.add_argument("--quick", action="store_true", help="a short form, without aims")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
