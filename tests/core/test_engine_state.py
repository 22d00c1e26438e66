"""The engine state is one class in every process that reads it."""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec

from goodput_core.engine_state import NO_STATISTICS, EngineState, EngineStatistics


def test_the_statistics_of_two_engines_add_up_field_by_field() -> None:
    names = [field.name for field in fields(EngineStatistics)]
    one = EngineStatistics(**{name: number for number, name in enumerate(names, 1)})
    other = EngineStatistics(**dict.fromkeys(names, 100))
    assert asdict(one.plus(other)) == {name: 100 + n for n, name in enumerate(names, 1)}
    assert one.plus(NO_STATISTICS) == one


def test_the_state_is_read_back_from_flat_json_with_other_fields_beside_it() -> None:
    state = EngineState(at_ns=5, running=2, preemptions=3, draining=True, length_error=0.5)
    body = msgspec.json.encode({"epoch": "e", **asdict(state), "answered": []})
    assert msgspec.json.decode(body, type=EngineState) == state
