"""The short form of the comparison of policies, as CI runs it."""

from __future__ import annotations

import json

import pytest
from benchmarks.policies_everywhere import main


@pytest.mark.slow(40)
@pytest.mark.timeout(600)
def test_slo_keeps_no_less_than_any_other_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["--quick", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert len(document["rule"]) >= 10
    assert not {one["cell"] for one in document["rule"] if one["broken"]}
    assert not {(one["cell"], one["policy"]) for one in document["hybrid"] if one["broken"]}
    assert not {one["name"] for one in document["plateau"] if one["broken"]}
    assert code == 0
