"""The cost of sampling is measured without a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from benchmarks.throughput import SAMPLING, VOCABULARY, main

from goodput_engine.executor.torch.sampling import Sampler

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.torch


def test_each_kind_of_options_is_sampled_by_the_executors_sampler_for_each_number_of_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[int, ...]] = []
    choose = Sampler.choose

    def log(sampler: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        assert len(rows) == len(logits)
        sampled.append(tuple(logits.shape))
        return choose(sampler, logits, rows)

    monkeypatch.setattr(Sampler, "choose", log)
    assert main(["--sampling", "--quick", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["options"] for row in document["rows"]] == list(SAMPLING)
    for row in document["rows"]:
        assert 0 < row["step_ms"]["1"] < row["step_ms"]["32"]
    # Two measured steps, and one before them.
    assert sampled == [(rows, VOCABULARY) for rows in (1, 32) for _ in range(3)] * len(SAMPLING)


def test_the_table_has_a_line_for_each_kind_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sampling", "--quick"]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading == "| options | 1 row | 32 rows | per row of the last |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(SAMPLING)
    assert all(line.endswith(" µs |") for line in lines)
