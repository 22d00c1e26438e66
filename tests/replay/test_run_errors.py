"""The most frequent errors of a run are found, however many distinct ones it has."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.records import request_record
from tests.replay.conftest import INFO, SLO

from goodput_core.slo.record import Outcome
from goodput_replay.runs.error_counts import count_errors
from goodput_replay.runs.folder import RunWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from goodput_replay.runs.summary import Summary


def _write(folder: Path, details: Sequence[str]) -> Summary:
    """Record requests that failed with these messages, and one complete response."""
    with RunWriter(folder, slo=SLO) as writer:
        for number, detail in enumerate(details):
            writer.append(
                request_record(
                    request_id=f"r{number}",
                    slo_class="batch",
                    sent_ns=0,
                    end_ns=1,
                    outcome=Outcome.ERROR,
                    status=500,
                    detail=detail,
                )
            )
        return writer.finish(INFO)


@settings(max_examples=examples(20))
@given(
    details=st.lists(st.sampled_from("abcdefghij") | st.integers(0, 500).map(str), max_size=300),
    max_distinct=st.integers(1, 30),
)
def test_frequent_errors_are_found_and_their_counts_are_exact(
    tmp_path_factory: pytest.TempPathFactory, details: list[str], max_distinct: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _write(folder, details)
    found = count_errors(folder, max_distinct=max_distinct)
    exact = Counter(details)
    assert found.total == len(details)
    assert len(found.errors) == min(max_distinct, len(exact))
    counted = {detail: count for (_, _, detail), count in found.errors}
    assert all(exact[detail] == count for detail, count in counted.items())
    for detail, count in exact.items():
        assert detail in counted or count <= len(details) / (max_distinct + 1)
    assert list(counted.values()) == sorted(counted.values(), reverse=True)


def test_an_error_after_thousands_of_unique_ones_is_listed_first(tmp_path: Path) -> None:
    unique = [f"request {number:05} failed" for number in range(9000)]
    summary = _write(tmp_path, [*unique, *["no more workers"] * 40])
    assert (summary.errors[0].detail, summary.errors[0].count) == ("no more workers", 40)
    assert len(summary.errors) == 10
    assert {error.count for error in summary.errors[1:]} == {1}
    assert summary.other_errors == 9000 - 9
