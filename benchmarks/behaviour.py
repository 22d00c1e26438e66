"""Compare the behaviour of this tree with that of an earlier revision.

    python benchmarks/behaviour.py --base 81987b6
    python benchmarks/behaviour.py --base 81987b6 --only slo --json

Both revisions replay the same traces in virtual time, once for every scheduling policy and
preemption mode, and once for every placement policy, topology and control mode. The records of a
pair of runs must agree in every column that both have, and so must the control decisions.
Golden files, among them the rendered Kubernetes objects and the rendered chart, are compared by
content. Exits 1 if anything differs.

The earlier revision is installed from `git archive` into a temporary folder, without its
dependencies: it runs on those of the current environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from goodput_core.spec.choices import Policy, Preemption, RouterPolicy

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
GOLDEN = ("tests/operator/golden", "tests/charts/golden", "tests/replay/golden")
# A KV pool so small that every policy with preemption preempts.
DEVICE = """
name: tight
description: A small KV pool, so that requests are preempted.
illustrative: true
form: roofline
overlap: max
numbers:
  c0_ms: {value: 6, from: chosen}
  c1_us_per_token: {value: 30, from: chosen}
  c2_ns_per_context_token: {value: 49, from: chosen}
  c4_us_per_request: {value: 5, from: chosen}
  host_ms_per_step: {value: 0.5, from: chosen}
  host_us_per_request: {value: 5, from: chosen}
  kv_blocks: {value: 360, from: chosen}
  block_size: {value: 16, from: chosen}
  kv_bytes_per_token: {value: 131072, from: chosen}
  max_model_tokens: {value: 5760, from: chosen}
  vocab_size: {value: 32000, from: chosen}
  tensor_parallel: {value: 1, from: chosen}
  swap_gb_per_s: {value: 50, from: chosen}
  link_gb_per_s: {value: 50, from: chosen}
  startup_seconds: {value: 5, from: chosen}
"""
TOPOLOGIES = {
    "two pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 2}},
    "migration": {"migration": {}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One emulated run: the manifest's engine and what differs from the default fleet."""

    name: str
    policy: str = "sarathi"
    preemption: str = "recompute"
    router: str = "least-loaded"
    mode: str = "Manual"
    topology: str | None = None


def cases() -> list[Case]:
    every = [
        Case(name=f"{policy} {preemption}", policy=policy, preemption=preemption)
        for policy, preemption in itertools.product(map(str, Policy), map(str, Preemption))
    ]
    every += [Case(name=f"placement {router}", router=router) for router in map(str, RouterPolicy)]
    every += [Case(name=f"control {mode}", mode=mode) for mode in ("Auto", "Recommend")]
    every += [Case(name=f"topology {name}", topology=name) for name in TOPOLOGIES]
    return every


def manifest(case: Case) -> dict[str, object]:
    replicas: dict[str, object] = {"replicas": 2}
    if case.mode != "Manual":
        replicas = {"minReplicas": 1, "maxReplicas": 4}
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "emulated://llama-3-8b-h100"},
            "engine": {
                "policy": case.policy,
                "preemption": case.preemption,
                "tokenBudget": {"min": 128, "max": 4096, "initial": 1024},
            },
            **replicas,
            "router": {"policy": case.router, "replicas": 1},
            "slo": {
                "classes": [
                    {"name": "interactive", "ttftMs": 500, "tpotMs": 50, "objective": "99%"},
                    {"name": "batch", "ttftMs": 30000, "tpotMs": 200, "objective": "95%"},
                ],
                "default": "interactive",
            },
            "control": {"mode": case.mode, "intervalSeconds": 5},
        },
    }


class Side:
    """One revision, installed so that `python -m goodput_core` runs it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._env = {**os.environ, "PYTHONPATH": str(path), "COLUMNS": "100"}

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "goodput_core", *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode not in {0, 3}:
            sentence = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise SystemExit(f"{self.name}: {' '.join(arguments)}: {sentence[0]}")


def install(tree: Path, target: Path) -> Path:
    """Install a source tree without dependencies into `target`."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, tree],
        check=True,
    )
    return target


def archive(revision: str, into: Path) -> Path:
    tar = into.with_suffix(".tar")
    subprocess.run(["git", "archive", "-o", tar, revision], cwd=ROOT, check=True)
    with tarfile.open(tar) as files:
        files.extractall(into, filter="data")
    return into


def compare_records(old: pa.Table, new: pa.Table) -> list[str]:
    """Return columns of only one side, and the first differing row of every other column."""
    found = [
        f"column {name} is missing" for name in old.column_names if name not in new.column_names
    ]
    found += [f"column {name} is new" for name in new.column_names if name not in old.column_names]
    if old.num_rows != new.num_rows:
        return [*found, f"{old.num_rows} rows became {new.num_rows}"]
    old, new = (table.sort_by("request_id") for table in (old, new))
    for name in old.column_names:
        if name not in new.column_names or old[name].equals(new[name]):
            continue
        pairs = zip(old[name].to_pylist(), new[name].to_pylist(), strict=True)
        row, (before, after) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        found.append(f"{name}: row {row} was {before!r:.60} and is {after!r:.60}")
    return found


def compare_decisions(old: Path, new: Path) -> list[str]:
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (old, new)
    )
    if len(before) != len(after):
        return [f"{len(before)} decisions became {len(after)}"]
    for number, (one, other) in enumerate(zip(before, after, strict=True), 1):
        if one != other:
            keys = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
            return [f"decision {number} differs in {', '.join(keys)}"]
    return []


def compare_golden(base: Path) -> list[str]:
    found = []
    for folder in GOLDEN:
        names = {p.name for p in (base / folder).glob("*")} | {
            p.name for p in (ROOT / folder).glob("*")
        }
        for name in sorted(names):
            old, new = base / folder / name, ROOT / folder / name
            if not (old.exists() and new.exists()):
                found.append(f"{folder}/{name}: only {'before' if old.exists() else 'now'}")
            elif old.read_bytes() != new.read_bytes():
                diff = subprocess.run(
                    ["git", "diff", "--no-index", "--shortstat", old, new],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                found.append(f"{folder}/{name}:{diff.stdout.rstrip()}")
    return found


def replay(side: Side, case: Case, folder: Path, trace: Path) -> Path:
    here = folder / f"{case.name} {side.name}".replace(" ", "-")
    here.mkdir()
    (here / "service.yaml").write_text(yaml.safe_dump(manifest(case)))
    arguments = ["--emulate", str(here / "service.yaml"), "--device", str(folder / "tight.yaml")]
    if case.topology:
        (here / "topology.yaml").write_text(yaml.safe_dump(TOPOLOGIES[case.topology]))
        arguments += ["--topology", str(here / "topology.yaml")]
    out = here / "run"
    side.run("replay", "--trace", str(trace), *arguments, "--out", str(out), "--no-report")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base", required=True, help="the earlier revision")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    differences: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = archive(options.base, folder / "base")
        old = Side("old", install(base, folder / "old-site"))
        new = Side("new", install(ROOT, folder / "new-site"))
        (folder / "tight.yaml").write_text(DEVICE)
        trace = folder / "load.parquet"
        old.run("trace", "synthesize", "--out", str(trace), "--duration", "40s", "--rate", "40")
        for case in cases():
            if options.only not in case.name:
                continue
            before, after = (replay(side, case, folder, trace) for side in (old, new))
            tables = (pq.read_table(run / "records.parquet") for run in (before, after))
            found = compare_records(*tables)
            found += compare_decisions(*(run / "decisions.jsonl" for run in (before, after)))
            differences[case.name] = found
            if not options.json:
                print(f"{case.name:<24} {'; '.join(found) or 'equal'}", flush=True)
        differences["golden files"] = compare_golden(base)
    if options.json:
        print(json.dumps(differences, indent=2))
    else:
        print("\n".join(["golden files:", *(differences["golden files"] or ["  equal"])]))
    return 1 if any(differences.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
