"""A device that becomes slower during a run, and the requests that are counted apart by it."""

from __future__ import annotations

import json

import pytest
from benchmarks.comparison.design import read_knees
from benchmarks.comparison.fates import Fate
from benchmarks.slow_down import Part, PartResult, SlowingForm, main, measure

from goodput_core.steptime import StepShape
from goodput_engine.device.load import load_profile

FORM = load_profile("llama-3-8b-h100").form
DECODES = StepShape.of(decodes=4, decode_context_tokens=4000)


def test_all_times_of_a_slower_device_are_longer_by_the_factor() -> None:
    form = SlowingForm(FORM)
    mixed = DECODES.with_chunk(0, 512)
    assert form.step_ns(mixed) == FORM.step_ns(mixed)
    form.slower = 2
    assert form.step_ns(mixed) == 2 * FORM.step_ns(mixed)
    assert form.decode_times(4, [4000, 4004]) == [
        2 * ns for ns in FORM.decode_times(4, [4000, 4004])
    ]
    tokens = form.chunk_within(DECODES, 0, form.step_ns(mixed))
    assert tokens == pytest.approx(512, abs=1)


def test_requests_that_ended_before_the_slow_down_do_not_see_it() -> None:
    runs = [measure("chat", 0.8, slower, read_knees(), [1]) for slower in (1, 2)]
    before = [{fate: run[Part.ENDED, fate] for fate in Fate} for run in runs]
    assert before[0] == before[1]
    assert before[0][Fate.KEPT] > 0
    arrived_later = [
        sum(run[part, fate] for part in (Part.ADAPTING, Part.SETTLING, Part.LATER) for fate in Fate)
        for run in runs
    ]
    assert arrived_later[0] == arrived_later[1] > 0
    fast, slow = (run[Part.LATER, Fate.KEPT] for run in runs)
    assert slow < 0.8 * fast


@pytest.mark.parametrize(
    ("part", "late", "missed"),
    [
        (Part.LATER, 1, False),
        (Part.LATER, 2, True),
        (Part.ENDED, 2, True),
        (Part.IN_FLIGHT, 2, False),
    ],
)
def test_the_aim_holds_before_the_slow_down_and_after_the_adaptation(
    part: Part, late: int, missed: bool
) -> None:
    one = PartResult(part=part, kept=100 - late, refused=5, late=late, late_first=late, late_pace=0)
    assert one.missed == missed


def test_the_command_prints_every_part_of_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--mixes chat --factors 0.5 --slower 1 --seeds 1 --jobs 1 --json"
    code = main(options.split())
    document = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in document["rows"]] == list(Part)
    assert code == document["missed"] == 0
