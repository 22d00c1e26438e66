"""The table of `benchmarks.model_servers` joins the repeats of each server and rate."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.model_servers import ServedRun, main, table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def run(server: str, rate: str, *, good: int, cpu_s: float, **more: float | None) -> ServedRun:
    return ServedRun(
        server=server,
        rate=rate,
        requests=40,
        good=good,
        outcomes={"ok": 38, "shed": 2},
        window_s=20,
        ttft_p50_ms=more.get("ttft_p50_ms", 100),
        ttft_p99_ms=900,
        tpot_p50_ms=50,
        tokens=1000,
        took_s=25,
        cpu_s=cpu_s,
        memory_mib=1500.4,
    )


def test_a_row_has_the_medians_and_the_sums_of_its_repeats() -> None:
    runs = [
        run("goodput", "30/m", good=20, cpu_s=10),
        run("llama_cpp", "30/m", good=40, cpu_s=1, ttft_p50_ms=None),
        run("goodput", "30/m", good=40, cpu_s=30, ttft_p50_ms=300),
        run("goodput", "30/m", good=30, cpu_s=20, ttft_p50_ms=200),
    ]
    _, _, first, second = table(runs)
    assert first == (
        "| 30/m | goodput | 3 | 75.0% | 1.50 | 200 | 900 | 50 | 40.0 | 20.0 | 1,500 "
        "| 114 ok, 6 shed |"
    )
    assert second.startswith("| 30/m | llama_cpp | 1 | 100.0% | 2.00 | – | 900 |")


def test_earlier_results_are_printed_without_a_new_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    lines = [asdict(run(server, "12/m", good=8, cpu_s=1)) for server in ("llama_cpp", "goodput")]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr("benchmarks.model_servers.find_spec", lambda _: True)
    monkeypatch.setattr("benchmarks.model_servers.model_folder", lambda: tmp_path)
    assert main(["--results", str(file), "--repeats", "0", "--servers", "goodput"]) == 0
    rows = [row.split(" | ")[1] for row in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["goodput", "llama_cpp"]
