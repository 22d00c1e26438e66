"""Random loads: what is drawn can be served, and is the same in every run."""

from __future__ import annotations

import json

import pytest
from benchmarks.comparison.admitted import is_ensurable
from benchmarks.comparison.loads import MIXES, offered
from benchmarks.random_loads import main, random_cell


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_an_idle_device_can_meet_the_targets_of_a_drawn_load(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(first, first + 20):
        cell, mix = random_cell(number)
        again, _ = random_cell(number)
        assert cell == again
        monkeypatch.setitem(MIXES, mix.name, mix)
        requests = offered(cell.load, 1)
        assert 20 <= len(requests) <= 1500
        blocks = cell.fleet.profile().kv_blocks
        for request in requests:
            assert request.prompt_tokens + request.output_tokens <= blocks * 16
            assert is_ensurable(
                cell.fleet.profile(),
                prompt_tokens=request.prompt_tokens,
                output_limit=request.output_tokens,
                e2e_ns=request.targets.e2e_ns,
            )


def test_slo_is_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--first", "4", "--count", "1", "--seeds", "1", "--jobs", "1"]
    assert main([*options, "--policies", "priority", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["closest"] == "priority"
    assert 0 < result["in_time"] <= result["admitted"] <= result["requests"]
    assert main([*options, "--policies", "slo"]) == 0
    assert "1 loads." in capsys.readouterr().out
