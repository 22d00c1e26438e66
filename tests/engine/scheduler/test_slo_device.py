"""The test whether the device computes a new prompt in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.policies.slo.device import (
    PromptSteps,
    WalkedPrompts,
    late_prompts,
)
from goodput_engine.scheduler.policies.slo.prompts import Prompt, PromptTime, latest_starts
from goodput_engine.scheduler.request_table import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


def _prompt(rid: int, *, due: int, work: int, share: int | None = None, level: int = 0) -> Prompt:
    request = ScheduledRequest(rid=rid, arrival_ns=0, input_tokens=1, priority=-level)
    return Prompt(level, due, rid, work, work if share is None else share, due, request)


def _steps(
    length: float = 10.0,
    *,
    decodes: float = 0.0,
    decode: float = 0.0,
    ends: Sequence[int] = (),
    passed: int = 0,
) -> PromptSteps:
    return PromptSteps(length, decodes, decode, ends, passed)


def _late(
    prompts: list[Prompt],
    new: Prompt,
    *,
    steps: PromptSteps | None = None,
    begins: int = 0,
    margin: int = 0,
    share: float = 1.0,
) -> list[int] | None:
    found = late_prompts(
        sorted(prompts),
        new,
        walked=WalkedPrompts(steps or _steps(), begins),
        margin_ns=margin,
        share=share,
    )
    return None if found is None else [request.rid for request in found]


def _ends(prompts: list[Prompt], begins: int) -> dict[int, float]:
    """Compute prompts one after another, or together; return the time at which each ends."""
    ends, at = {}, float(begins)
    for prompt in sorted(prompts):
        at += prompt.share_ns
        ends[prompt.rid] = max(at, begins + prompt.work_ns)
    return ends


def _simulated(
    prompts: list[Prompt], new: Prompt, *, begins: int, margin: int, share: float
) -> list[int] | None:
    before, after = _ends(prompts, begins), _ends([*prompts, new], begins)
    waits = sum(prompt.share_ns for prompt in prompts if prompt < new)
    if begins + waits + new.work_ns + margin > new.due_ns:
        return None
    if waits > share * (new.due_ns - new.work_ns - begins):
        return None
    late = [p for p in sorted(prompts) if before[p.rid] <= p.due_ns < after[p.rid]]
    if any(prompt.request.priority >= new.request.priority for prompt in late):
        return None
    return [prompt.rid for prompt in late]


def test_a_prompt_that_is_late_anyway_is_no_reason_to_refuse() -> None:
    late, new = _prompt(1, due=10, work=11), _prompt(3, due=8, work=2)
    assert _late([late], new) == []
    assert _late([late, _prompt(2, due=23, work=10)], new) == []
    assert _late([late, _prompt(2, due=22, work=10)], new) is None, "in time without the new one"


def test_a_prompt_that_is_alone_needs_its_work_and_the_margin() -> None:
    assert _late([], _prompt(1, due=10, work=10)) == []
    assert _late([], _prompt(1, due=10, work=11)) is None
    assert _late([], _prompt(1, due=10, work=8), margin=2) == []
    assert _late([], _prompt(1, due=10, work=8), margin=3) is None
    assert _late([], _prompt(1, due=10, work=8), begins=3) is None


def test_a_prompt_starts_after_those_that_are_due_before_it() -> None:
    earlier, later = _prompt(1, due=5, work=5), _prompt(2, due=100, work=50)
    assert _late([earlier, later], _prompt(3, due=10, work=5)) == []
    assert _late([earlier, later], _prompt(3, due=10, work=6)) is None


def test_no_prompt_that_is_as_important_becomes_late() -> None:
    other = _prompt(1, due=20, work=10)
    assert _late([other], _prompt(2, due=15, work=10)) == []
    assert _late([other], _prompt(2, due=15, work=11)) is None


def test_less_important_prompts_become_late_for_a_new_one() -> None:
    others = [_prompt(1, due=12, work=10, level=1), _prompt(2, due=40, work=10, level=1)]
    assert _late(others, _prompt(3, due=30, work=5)) == [1]
    assert _late(others, _prompt(3, due=30, work=25)) == [1, 2]


def test_a_less_important_prompt_that_is_late_already_is_not_counted() -> None:
    assert _late([_prompt(1, due=5, work=10, level=1)], _prompt(2, due=30, work=5)) == []


def test_more_important_prompts_come_first_even_if_they_are_due_later() -> None:
    other = _prompt(1, due=100, work=10)
    assert _late([other], _prompt(2, due=15, work=6, level=1)) is None
    assert _late([other], _prompt(2, due=16, work=6, level=1)) == []


def test_prompts_before_a_new_one_take_only_its_share_of_the_time() -> None:
    other, new = _prompt(1, due=10, work=10), _prompt(2, due=30, work=10)
    assert _late([other], new, share=0.5) == []
    assert _late([other], new, share=0.49) is None
    assert _late([], new, share=0.01) == [], "an idle device is never kept free"


# Level, due time, and two times: the shorter one is what a prompt adds to the steps of others.
_PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20), st.integers(0, 20))


@given(
    queue=st.lists(_PROMPTS, max_size=8),
    new=_PROMPTS,
    begins=st.integers(0, 10),
    margin=st.integers(0, 10),
    share=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_late_prompts_agree_with_a_sum_of_their_work(
    queue: list[tuple[int, int, int, int]],
    new: tuple[int, int, int, int],
    begins: int,
    margin: int,
    share: float,
) -> None:
    """Steps without decodes cost nothing to cut."""

    def odd(rid: int, drawn: tuple[int, int, int, int]) -> Prompt:
        # No sum of work is a due time, so rounding decides nothing.
        level, due, work, share = drawn
        return _prompt(
            rid, level=level, due=2 * due + 1, work=2 * max(work, share), share=2 * share
        )

    begins, margin = 2 * begins, 2 * margin
    prompts: list[Prompt] = []
    for prompt in sorted(odd(rid, drawn) for rid, drawn in enumerate(queue, start=1)):
        # Admitted prompts are in time without the new one.
        if _ends([*prompts, prompt], begins)[prompt.rid] <= prompt.due_ns:
            prompts.append(prompt)
    added = odd(99, new)
    expected = _simulated(prompts, added, begins=begins, margin=margin, share=share)
    assert _late(prompts, added, begins=begins, margin=margin, share=share) == expected


def test_a_prompt_that_only_another_order_computes_in_time_is_made_late() -> None:
    waiting, above = _prompt(1, due=10, work=4, level=0), _prompt(2, due=40, work=8, level=-1)
    new = _prompt(3, due=40, work=1, level=-1)
    prompts = sorted([waiting, above])

    def late(new: Prompt, *, reorders: bool) -> list[ScheduledRequest] | None:
        return late_prompts(
            prompts,
            new,
            walked=WalkedPrompts(_steps(), 0),
            margin_ns=0.0,
            share=1.0,
            reorders=reorders,
        )

    assert late(new, reorders=False) == [], "late behind its level without the new one"
    assert late(new, reorders=True) == [waiting.request]
    assert late(_prompt(4, due=40, work=1, level=0), reorders=True) is None, "it is no better"


@given(
    arrivals=st.lists(st.tuples(_PROMPTS, st.booleans(), st.booleans()), min_size=2, max_size=8),
    decodes=st.sampled_from([0.0, 4.0]),
    ends=st.lists(st.integers(1, 6), max_size=4),
)
def test_prompts_that_were_put_into_steps_before_change_no_answer(
    arrivals: list[tuple[tuple[int, int, int, int], bool, bool]], decodes: float, ends: list[int]
) -> None:
    """Requests that arrive before one step: some are admitted, and then one may be displaced."""
    steps = _steps(decodes=decodes, decode=0.5, ends=sorted(ends))
    kept, prompts = WalkedPrompts(steps, 3), list[Prompt]()
    for rid, ((level, due, work, share), displaces, reorders) in enumerate(arrivals):
        new = _prompt(rid, level=level, due=due, work=work, share=share)
        answers = [
            late_prompts(prompts, new, walked=walked, margin_ns=0, share=1, reorders=reorders)
            for walked in (kept, WalkedPrompts(steps, 3))
        ]
        assert answers[0] == answers[1]
        prompts = sorted([*prompts[displaces:], new])


@given(
    prompts=st.lists(
        st.tuples(st.integers(-2, 0), st.integers(5, 60), st.integers(1, 9)), min_size=1, max_size=7
    )
)
def test_the_latest_start_of_a_prompt_leaves_time_for_those_behind_it(
    prompts: list[tuple[int, int, int]],
) -> None:
    ordered = sorted(
        _prompt(rid, due=due, work=work, level=level)
        for rid, (level, due, work) in enumerate(prompts)
    )
    starts = latest_starts(ordered)
    for at, first in enumerate(ordered):
        behind = [prompt for prompt in ordered[at:] if prompt.level == first.level]

        def in_time(start: float, prompts: list[Prompt] = behind) -> bool:
            return all(
                start + sum(p.work_ns for p in prompts[: n + 1]) <= prompt.due_ns
                for n, prompt in enumerate(prompts)
            )

        assert in_time(starts[first.rid])
        assert not in_time(starts[first.rid] + 1)


# --- steps ---------------------------------------------------------------------------------------
def _served(prompts: list[Prompt], *, length: float, decodes: float) -> dict[int, float]:
    """Compute prompts in the steps of the policy; return the time at which each of them ends.

    A step ends early for a prompt that is due in it, if the step can still compute the prompt.
    """
    left = {prompt.rid: prompt.share_ns * (1 - decodes / length) for prompt in sorted(prompts)}
    due = {prompt.rid: prompt.due_ns for prompt in prompts}
    ends, now = {}, 0.0
    while left:
        within, needed = length, decodes
        for rid, work in left.items():
            needed += work
            if needed > within:
                break
            within = min(within, max(needed, 0.95 * (due[rid] - now)))
        room = within - decodes
        for rid in [*left]:
            done = min(room, left[rid])
            room, left[rid] = room - done, left[rid] - done
            if left[rid] > 1e-6:
                break
            ends[rid] = now + within
            del left[rid]
        now += within
    return ends


@given(
    drawn=st.lists(st.tuples(st.integers(40, 400), st.integers(1, 120)), min_size=1, max_size=9),
    decodes=st.sampled_from([0.0, 5.0, 20.0, 35.0]),
)
def test_prompts_that_pass_are_in_time_in_steps_that_are_cut(
    drawn: list[tuple[int, int]], decodes: float
) -> None:
    steps = _steps(50.0, decodes=decodes)
    admitted: list[Prompt] = []
    for rid, (due, work) in enumerate(drawn):
        prompt = _prompt(rid, due=due, work=work)
        if _late(admitted, prompt, steps=steps) == []:
            admitted.append(prompt)
    ends = _served(admitted, length=50.0, decodes=decodes)
    for prompt in admitted:
        assert ends[prompt.rid] <= prompt.due_ns + 1e-6


def test_a_cut_costs_the_decodes_of_one_more_step() -> None:
    # Both fit into one step, 8 for decodes and 30.4 for prompts, if the first is not due in it.
    steps = _steps(40.0, decodes=8.0)
    soon, later = _prompt(1, due=20, work=10), _prompt(1, due=41, work=10)

    def passes(first: Prompt, due: int) -> bool:
        margin = 1000 - due
        return _late([first], _prompt(2, due=1000, work=28), steps=steps, margin=margin) == []

    assert passes(later, 39)
    assert not passes(soon, 46)
    assert passes(soon, 47)


@pytest.mark.parametrize(
    ("ends", "passed", "due"),
    [((), 0, 33), ((1, 1), 0, 30), ((3, 3), 2, 30), ((3, 3), 0, 33), ((1, 1), 1, 33)],
    ids=["none ends", "two end", "two end later in the count", "too late", "ended before"],
)
def test_computed_prompts_add_a_decode_until_others_end(
    ends: tuple[int, ...], passed: int, due: int
) -> None:
    others = [_prompt(rid, due=100 + rid, work=10) for rid in (1, 2)]
    steps = _steps(10.0, decode=0.6, ends=ends, passed=passed)

    def passes(until: int) -> bool:
        return _late(others, _prompt(3, due=1000, work=10), steps=steps, margin=1000 - until) == []

    assert passes(due)
    assert not passes(due - 1)


def test_the_time_of_prompts_is_a_mean_over_steps_with_decodes() -> None:
    prompt_time = PromptTime()
    assert prompt_time.mean_ns(0) == 0
    for epoch in range(4, 1000, 4):
        prompt_time.observe(80.0, epoch=epoch)
    assert prompt_time.mean_ns(999) == pytest.approx(20, rel=0.05), "every fourth step has prompts"
    assert prompt_time.mean_ns(999 + 64) == pytest.approx(20 / 2.72, rel=0.05)


def test_the_first_prompt_is_not_taken_as_the_mean() -> None:
    prompt_time = PromptTime()
    prompt_time.observe(80.0, epoch=1)
    assert prompt_time.mean_ns(1) == pytest.approx(80 / 17, rel=0.2)
