"""Differences between latencies in virtual time and over HTTP, for the same requests and device.

The trace is replayed in virtual time, and then in real time against a service that runs as real
processes. Only the second run has a network, parsing, and a machine with other work.

    python benchmarks/virtual_against_real.py --trace azure.parquet --window 10m..15m
    python benchmarks/virtual_against_real.py --quick     # twenty seconds of the sample trace
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
RULES = ("batch: input_tokens >= 2048", "interactive: *")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantile in both runs, milliseconds."""

    name: str
    virtual_ms: float
    real_ms: float

    @property
    def difference(self) -> float:
        """Relative difference of real from virtual."""
        return self.real_ms / self.virtual_ms - 1


def replay(where: Path, *arguments: str) -> Path:
    """Run `replay` and return its run folder."""
    command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
    command += ["--out", str(where), "--json", "--no-report"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return where


def latencies(run: Path) -> dict[str, NDArray[np.float64]]:
    """Return TTFT, and all gaps between tokens, of a run, milliseconds."""
    table = pq.read_table(run / "records.parquet")
    scheduled = table["scheduled_ns"].to_numpy()
    first = table["first_token_ns"].to_numpy(zero_copy_only=False)
    has_output = ~np.isnan(first.astype(float))
    gaps = table["gaps_us"].combine_chunks().flatten().to_numpy()
    return {
        "TTFT": (first[has_output] - scheduled[has_output]).astype(float) / 1e6,
        "TBT": gaps.astype(float) / 1e3,
    }


def compare(virtual: Path, real: Path) -> list[Row]:
    """Return the quantiles of both runs."""
    one, other = latencies(virtual), latencies(real)
    return [
        Row(
            name=f"{name} p{share}",
            virtual_ms=float(np.percentile(one[name], share)),
            real_ms=float(np.percentile(other[name], share)),
        )
        for name in one
        for share in (50, 90, 99)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default="sample")
    parser.add_argument("--window", help="part of the trace, for example 10m..15m")
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/chat.yaml")
    parser.add_argument("--quick", action="store_true", help="twenty seconds of the sample trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    common = ["--trace", args.trace]
    window = "..20s" if args.quick else args.window
    common += ["--window", window] if window else []
    for rule in RULES:
        common += ["--class-by", rule]
    with tempfile.TemporaryDirectory() as folder:
        virtual = replay(Path(folder) / "virtual", *common, "--emulate", str(args.manifest))
        real = replay(Path(folder) / "real", *common, "-f", str(args.manifest))
        rows = compare(virtual, real)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("metric      virtual ms    real ms  difference")
    for row in rows:
        print(f"{row.name:10} {row.virtual_ms:11.2f} {row.real_ms:10.2f} {row.difference:11.1%}")


if __name__ == "__main__":
    main()
