"""Write a cell of the comparison of policies as files for the command line.

    python -m benchmarks.export_cell textbook/hybrid --seed 7 --out textbook
    replay --trace textbook/trace.parquet --emulate textbook/service.yaml \\
        --device textbook/device.yaml

The trace holds the requests of a seed with their own targets, the manifest the settings of the
engine, and the device profile the size of the KV pool. `replay` thus serves the same requests as
the comparison, with any change of the three files. A class of a manifest must have a TTFT and a
TPOT target; where the requests have none, it has targets that no request misses.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml
from benchmarks.comparison.loads import offered
from benchmarks.policies_everywhere import design

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.comparison.cells import Cell, Fleet
    from benchmarks.comparison.loads import OfferedRequest

__all__ = ["export", "main"]

_LOOSE_MS: Final = 3_600_000


def export(cell: Cell, policy: str, seed: int, folder: Path) -> None:
    """Write the trace, the manifest and the device profile of a cell."""
    folder.mkdir(parents=True, exist_ok=True)
    requests = offered(cell.load, seed)
    write_trace(
        folder / "trace.parquet",
        _rows(requests),
        TraceMetadata(clock=Clock.TRACE_RELATIVE),
        overwrite=True,
    )
    (folder / "service.yaml").write_text(
        yaml.safe_dump(_manifest(cell, policy, requests), sort_keys=False)
    )
    (folder / "device.yaml").write_text(yaml.safe_dump(_device(cell.fleet), sort_keys=False))


def _rows(requests: Sequence[OfferedRequest]) -> Iterator[TraceRow]:
    for number, request in enumerate(requests):
        targets = request.targets
        ttft_ns, tpot_ns, e2e_ns = targets.ttft_ns, targets.tpot_ns, targets.e2e_ns
        yield TraceRow(
            request_id=f"row-{number}",
            timestamp_start_unix_ns=request.arrival_ns,
            input_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_output_tokens=request.max_tokens,
            total_hashes=tuple(request.hashes),
            block_size=request.block_size or None,
            slo_class=request.slo_class,
            ttft_target_ms=None if ttft_ns is None else ttft_ns / NS_PER_MS,
            tpot_target_ms=None if tpot_ns is None else tpot_ns / NS_PER_MS,
            e2e_target_ms=None if e2e_ns is None else e2e_ns / NS_PER_MS,
            priority=request.priority,
        )


def _manifest(cell: Cell, policy: str, requests: Sequence[OfferedRequest]) -> dict[str, object]:
    fleet = cell.fleet
    by_class = {request.slo_class: request for request in requests}
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "cell"},
        "spec": {
            "model": {"source": "emulated://device.yaml"},
            "replicas": fleet.replicas,
            "engine": {
                "policy": str(policy),
                "preemption": str(cell.preemption),
                "tokenBudget": {"initial": fleet.token_budget},
                "maxNumSeqs": fleet.max_num_seqs,
                "maxWaiting": fleet.max_waiting,
                "swapSpaceGib": fleet.swap_gib,
            },
            "router": {"policy": str(fleet.placement)},
            "slo": {
                "classes": [
                    {
                        "name": name,
                        "ttftMs": (request.targets.ttft_ns or _LOOSE_MS * NS_PER_MS) // NS_PER_MS,
                        "tpotMs": (request.targets.tpot_ns or _LOOSE_MS * NS_PER_MS) // NS_PER_MS,
                        "priority": request.priority,
                        "weight": request.weight,
                    }
                    for name, request in by_class.items()
                ],
                "default": next(iter(by_class)),
            },
        },
    }


def _device(fleet: Fleet) -> dict[str, object]:
    """Return the document of the cell's device profile."""
    shipped = resources.files("goodput_engine.device") / "profiles" / f"{fleet.device}.yaml"
    document: dict[str, object] = yaml.safe_load(shipped.read_text())
    numbers = document["numbers"]
    assert isinstance(numbers, dict)
    document["name"] = "cell"
    if fleet.kv_blocks is not None:
        numbers["kv_blocks"] = {"value": fleet.kv_blocks, "from": "the cell"}
    if fleet.swap_gb_per_s is not None:
        numbers["swap_gb_per_s"] = {"value": fleet.swap_gb_per_s, "from": "the cell"}
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files of a cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cell", help="name of a cell, from policies_everywhere --list")
    parser.add_argument("--azure", help="Parquet file of the Azure trace, for its cells")
    parser.add_argument("--mooncake", help="Parquet file of the Mooncake trace, for its cells")
    parser.add_argument(
        "--policy", default=Policy.SLO, choices=sorted(Policy), help="(%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    paths = {name: path for name in ("azure", "mooncake") if (path := getattr(args, name))}
    cells = {cell.name: cell for cell in design(paths)}
    cell = cells.get(args.cell)
    if cell is None:
        parser.error(f"{args.cell!r} is no cell; policies_everywhere --list prints all names")
    export(cell, args.policy, args.seed, args.out)
    print(
        f"replay --trace {args.out}/trace.parquet --emulate {args.out}/service.yaml "
        f"--device {args.out}/device.yaml"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
