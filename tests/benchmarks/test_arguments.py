"""Wrong arguments of the benchmarks end with a sentence that names the option and its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import control, error_rates, loadgen, policies_everywhere, refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@pytest.mark.parametrize(
    ("main", "arguments", "problem"),
    [
        (policies_everywhere.main, ["--policies", "fifo"], "--policies: 'fifo' is not one of"),
        (policies_everywhere.main, ["--policies", "slo"], "--policies: name a policy"),
        (
            policies_everywhere.main,
            ["--checks", "rules"],
            "--checks: 'rules' is not one of rule, hybrid, plateau",
        ),
        (policies_everywhere.main, ["--seeds", "0"], "--seeds: 0 is less than 1"),
        (
            policies_everywhere.main,
            ["--cells", "nothing"],
            "--cells: no cell has a name with 'nothing'",
        ),
        (refusals.main, ["--mixes", "chats"], "--mixes: 'chats' is not one of"),
        (refusals.main, ["--checks", "false"], "--checks: 'false' is not one of forced, retries"),
        (refusals.main, ["--factors", "0"], "--factors: '0' is not a number above 0"),
        (refusals.main, ["--factors", "two"], "--factors: 'two' is not a number above 0"),
        (refusals.main, ["--requests", "0"], "--requests: 0 is less than 1"),
        (refusals.main, ["--max-retries", "0"], "--max-retries: 0 is less than 1"),
        (refusals.main, ["--jobs", "all"], "--jobs: 'all' is not a whole number"),
        (control.main, ["--days", "flash,weekend"], "--days: 'weekend' is not one of documented"),
        (error_rates.main, ["--cases", "weekend"], "--cases: no case has a name with 'weekend'"),
        (error_rates.main, ["--parts", "gate"], "--parts: 'gate' is not one of runs, pairs"),
        (error_rates.main, ["--trials", "0"], "--trials: 0 is less than 1"),
        (control.main, ["--laws", "none"], "--laws: 'none' is not one of"),
        (loadgen.main, ["--tools", "wrk"], "--tools: 'wrk' is not one of bare, replay,"),
        (loadgen.main, ["--rates", "100,0"], "--rates: 0 is less than 1"),
        (loadgen.main, ["--climb", "fast"], "--climb: 'fast' is not a whole number"),
    ],
)
def test_a_wrong_argument_is_named(
    main: Callable[[Sequence[str]], int],
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert problem in capsys.readouterr().err
