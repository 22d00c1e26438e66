"""Loads with shared prefixes: what `slo` keeps, and the command."""

from __future__ import annotations

import json

import pytest
from benchmarks.shared_prefixes import LOADS, main, measure, requests_of

from benchmarks import shared_prefixes


@pytest.mark.parametrize("load", LOADS)
def test_a_load_is_the_same_for_every_policy_and_shares_prefixes(load: str) -> None:
    requests = requests_of(load, 1, hidden=False)
    assert requests == requests_of(load, 1, hidden=False)
    assert all(len(one.hashes) * 16 <= one.prompt_tokens for one in requests)
    blocks = [key for one in requests for key in one.hashes]
    assert len(set(blocks)) < len(blocks) / 2
    assert all(one.max_tokens is None for one in requests_of(load, 1, hidden=True))


@pytest.mark.parametrize(
    ("load", "kv_blocks"), [("cold burst", 8000), ("samples 2/s", 8000), ("samples 2/s", 1500)]
)
def test_slo_keeps_at_least_as_much_as_sjf(load: str, kv_blocks: int) -> None:
    ours, theirs = (measure(load, kv_blocks, name, [7], hidden=False) for name in ("slo", "sjf"))
    assert ours.kept >= 0.99 * theirs.kept > 0
    assert ours.kept >= 0.99 * (ours.kept + ours.late)


def test_the_command_fails_if_another_policy_keeps_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--loads", "cold burst", "--policies", "slo,sjf", "--seeds", "1", "--json"]
    assert main(options) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["kept"], row["missed"]) for row in rows] == [
        ("slo", 40, False),
        ("sjf", 40, False),
    ] * 2
    monkeypatch.setattr(shared_prefixes, "_SHARE", 1.01)
    assert main(options) == 1
