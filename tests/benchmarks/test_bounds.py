"""Bounds and schedules of small cases against complete enumeration, and of cases done by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from benchmarks.bound.clairvoyant import Limits
from benchmarks.bound.prices import Prices, bound_at, edges_of
from benchmarks.bound.schedule_search import best_schedule
from benchmarks.bound.stages import Demand, Resources, hidden_stages, known_stages
from benchmarks.bound.step_bounds import Capacity, StepBound, capacity_of
from benchmarks.bounds import Bound, clairvoyant_bound, demands_of, informed_bound, main
from benchmarks.comparison.cells import Cell, Fleet, run_cell
from benchmarks.comparison.design import textbook_cells
from benchmarks.comparison.loads import Load, OfferedRequest, offered
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.targets import Targets
from goodput_core.steptime.forms import StepShape
from goodput_core.units import NS_PER_S
from goodput_engine.device.load import load_profile
from goodput_engine.device.profile import DeviceProfile, Overlap

if TYPE_CHECKING:
    from pathlib import Path

MS = 1e-3
CLOSE = 1e-6
PROFILES = (
    "unit",
    "llama-3-8b-h100",
    "llama-3-70b-4xh100",
    "opt-13b-a100",
    "published-70b-table",
)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A few requests on a device whose steps take 1 ms, with blocks of one token."""

    demands: tuple[Demand, ...]
    slots: int
    kv_tokens: int
    replicas: int

    @property
    def profile(self) -> DeviceProfile:
        return replace(load_profile("unit"), kv_blocks=self.kv_tokens, block_size=1)

    @property
    def limits(self) -> Limits:
        return Limits(max_num_seqs=self.slots)

    @property
    def capacity(self) -> Capacity:
        return capacity_of(self.profile, max_num_seqs=self.slots)


def best_of_all(tiny: Tiny) -> float:
    """Return the largest weight in time over all schedules, if copies of KV blocks are free.

    A step computes a complete prompt or one decode of each of its requests.
    """
    demands = tiny.demands
    arrivals = [round(d.arrival_s / MS) for d in demands]
    first = [d.first_due_s / MS + 1e-6 for d in demands]
    last = [d.last_due_s / MS + 1e-6 for d in demands]

    def possible(members: tuple[int, ...], done: tuple[int, ...]) -> bool:
        tokens = sum(demands[i].prompt_tokens + done[i] for i in members)
        return len(members) <= tiny.slots and tokens <= tiny.kv_tokens

    @cache
    def best(now: int, done: tuple[int, ...]) -> float:
        # −1 marks a request that is late.
        active = [
            i
            for i, emitted in enumerate(done)
            if 0 <= emitted < demands[i].output_tokens
            and now + 1 <= (last[i] if emitted else min(first[i], last[i]))
        ]
        if not active:
            return 0
        ready = [i for i in active if arrivals[i] <= now]
        done = tuple(n if i in active else -1 for i, n in enumerate(done))
        if not ready:
            return best(min(arrivals[i] for i in active), done)
        most = 0.0
        for places in itertools.product(range(tiny.replicas + 1), repeat=len(ready)):
            groups = [
                tuple(i for i, at in zip(ready, places, strict=True) if at == replica)
                for replica in range(1, tiny.replicas + 1)
            ]
            if not all(possible(group, done) for group in groups):
                continue
            chosen = {i for group in groups for i in group}
            if not chosen and len(ready) == len(active):
                continue
            after = tuple(n + (i in chosen) for i, n in enumerate(done))
            ended = sum(demands[i].weight for i in chosen if after[i] == demands[i].output_tokens)
            most = max(most, ended + best(now + 1, after))
        return most

    return best(0, (0,) * len(demands))


targets_ms = st.one_of(st.just(math.inf), st.integers(1, 5))


@st.composite
def tiny_demands(draw: st.DrawFn) -> Demand:
    ttft, tpot, e2e = (
        draw(targets_ms),
        draw(targets_ms),
        draw(st.integers(1, 9) | st.just(math.inf)),
    )
    return Demand(
        arrival_s=draw(st.integers(0, 4)) * MS,
        prompt_tokens=draw(st.integers(1, 5)),
        output_tokens=draw(st.integers(1, 4)),
        ttft_s=ttft * MS,
        tpot_s=tpot * MS,
        e2e_s=e2e * MS,
        weight=draw(st.sampled_from([1, 1, 2, 0.5])),
    )


tiny_cases = st.builds(
    Tiny,
    demands=st.lists(tiny_demands(), min_size=1, max_size=4).map(tuple),
    slots=st.integers(1, 3),
    kv_tokens=st.integers(6, 14),
    replicas=st.integers(1, 2),
)


@settings(deadline=None, max_examples=examples(60))
@given(tiny_cases)
def test_no_schedule_beats_the_enumeration_and_no_enumeration_the_bound(tiny: Tiny) -> None:
    bound = clairvoyant_bound(tiny.demands, tiny.capacity, replicas=tiny.replicas)
    schedule = best_schedule(
        tiny.demands,
        tiny.profile,
        limits=tiny.limits,
        replicas=tiny.replicas,
        surplus=bound.surplus,
        rounds=5,
    )
    optimum = best_of_all(tiny)
    assert schedule.value <= optimum + CLOSE
    assert optimum <= bound.certificate + CLOSE


@settings(deadline=None, max_examples=examples(40))
@given(tiny_cases, st.integers(0, 2**16), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_any_prices_give_an_upper_bound(tiny: Tiny, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    resources = Resources(tiny.capacity, tiny.replicas)
    stages = known_stages(tiny.demands, resources)
    for count in (1, 3, 50):
        edges = edges_of(stages, count, count)
        if np.isfinite(edges).all():
            shape = (len(resources.per_step), len(edges) - 1)
            prices = Prices(
                edges=edges,
                resources=rng.exponential(scale / MS, shape) * (rng.random(shape) < 0.7),
                steps=rng.exponential(scale, len(tiny.demands)),
            )
            assert best_of_all(tiny) <= bound_at(stages, resources, prices).bound + CLOSE


def test_the_enumeration_finds_more_than_one_request_and_not_always_all() -> None:
    """The two tests above compare numbers that vary."""
    rng = random.Random(3)
    found = []
    for _ in range(30):
        demands = tuple(
            Demand(
                arrival_s=rng.randint(0, 3) * MS,
                prompt_tokens=rng.randint(1, 5),
                output_tokens=rng.randint(1, 4),
                e2e_s=rng.randint(2, 6) * MS,
            )
            for _ in range(4)
        )
        tiny = Tiny(demands=demands, slots=2, kv_tokens=10, replicas=1)
        bound = clairvoyant_bound(demands, tiny.capacity)
        schedule = best_schedule(demands, tiny.profile, limits=tiny.limits, surplus=bound.surplus)
        found.append((schedule.value, best_of_all(tiny), bound.certificate))
    assert {optimum for _, optimum, _ in found} >= {2, 3, 4}
    # The schedule is the optimum in most cases, and the bound is close to it.
    assert sum(schedule == optimum for schedule, optimum, _ in found) >= 24
    assert sum(bound < optimum + 1 for _, optimum, bound in found) >= 24


@st.composite
def device_demands(draw: st.DrawFn) -> list[Demand]:
    rng = random.Random(draw(st.integers(0, 2**16)))
    tight = draw(st.sampled_from([0.2, 1.0, 4.0]))
    demands = []
    for _ in range(draw(st.integers(1, 25))):
        ttft, tpot, e2e = rng.choice(
            [(0.5, 0.05, math.inf), (math.inf, math.inf, 2.0), (1.0, math.inf, 3.0)]
        )
        demands.append(
            Demand(
                arrival_s=rng.random() * tight,
                prompt_tokens=rng.choice([20, 600, 3000]),
                output_tokens=rng.choice([1, 20, 120]),
                ttft_s=ttft,
                tpot_s=tpot,
                e2e_s=e2e,
                weight=rng.choice([1, 1, 3]),
            )
        )
    return demands


@pytest.mark.parametrize("name", PROFILES)
@settings(deadline=None, max_examples=examples(8))
@given(demands=device_demands(), replicas=st.integers(1, 2))
def test_a_schedule_on_a_device_stays_below_the_bound(
    name: str, demands: list[Demand], replicas: int
) -> None:
    profile = replace(load_profile(name), kv_blocks=400, block_size=16)
    bound = clairvoyant_bound(
        demands, capacity_of(profile, max_num_seqs=8, max_step_tokens=1024), replicas=replicas
    )
    schedule = best_schedule(
        demands,
        profile,
        limits=Limits(max_num_seqs=8, max_step_tokens=1024),
        replicas=replicas,
        surplus=bound.surplus,
        rounds=3,
    )
    assert schedule.value <= bound.certificate + CLOSE
    assert schedule.value == pytest.approx(sum(demands[i].weight for i in schedule.served))


@pytest.mark.parametrize("name", PROFILES)
@settings(deadline=None, max_examples=examples(60))
@given(
    decodes=st.integers(0, 600),
    context=st.integers(1, 4000),
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 4000)), max_size=4),
)
def test_every_line_lies_below_every_step(
    name: str, decodes: int, context: int, chunks: list[tuple[int, int]]
) -> None:
    if not decodes and not chunks:
        return
    profile = load_profile(name)
    shape = StepShape.of(decodes=decodes, decode_context_tokens=decodes * context, chunks=chunks)
    device_ns, host_ns = profile.form.step_ns(shape), profile.host_ns(shape.num_requests)
    step_ns = max(device_ns, host_ns) if profile.overlap is Overlap.MAX else device_ns + host_ns
    tokens = sum(count for _, count in chunks)
    for line in capacity_of(profile).steps:
        least_s = (
            line.step_s
            + (line.prompt_token_s + line.prompt_context_s) * tokens
            + line.prompt_s * len(chunks)
            + (line.decode_s + line.decode_context_s * context) * decodes
        )
        assert least_s * NS_PER_S <= step_ns * (1 + 1e-9) + 1


RUNS = {
    "generator": textbook_cells()[0],
    "chat": Cell(name="chat", load=Load(mix="chat", rate_per_s=40, horizon_s=3), fleet=Fleet()),
    "small KV pool": Cell(
        name="kv",
        load=Load(mix="kv-bound", rate_per_s=60, horizon_s=4),
        fleet=Fleet(kv_blocks=700, replicas=2),
    ),
}


@pytest.mark.parametrize("policy", ["sjf", "slo"])
@pytest.mark.parametrize("cell", RUNS.values(), ids=RUNS)
def test_no_policy_in_virtual_time_beats_the_bound(cell: Cell, policy: str) -> None:
    demands = demands_of(offered(cell.load, 7))
    capacity = capacity_of(
        cell.fleet.profile(), max_num_seqs=cell.fleet.max_num_seqs, max_step_tokens=8192
    )
    bound = clairvoyant_bound(demands, capacity, replicas=cell.fleet.replicas)
    kept = run_cell(cell, policy, 7, "recompute").kept_weight
    assert 0.2 * bound.certificate < kept <= bound.certificate + CLOSE


def steps_of(step_s: float = 0.001, **more: float) -> Capacity:
    return Capacity(steps=(StepBound(step_s=step_s),), **more)  # type: ignore[arg-type]


def served(bound: Bound) -> float:
    return round(bound.certificate, 5)


TEN_STEPS = Demand(arrival_s=0, prompt_tokens=4, output_tokens=10, e2e_s=0.010)


def test_a_search_that_starts_from_a_schedule_is_at_least_as_good() -> None:
    cell = textbook_cells()[0]
    demands = demands_of(offered(cell.load, 7))
    found = best_schedule(demands, cell.fleet.profile(), limits=Limits(max_num_seqs=24), rounds=60)
    short = [
        best_schedule(
            demands,
            cell.fleet.profile(),
            limits=Limits(max_num_seqs=24),
            start=start,
            rounds=1,
        )
        for start in ((), found.served)
    ]
    assert short[0].value < found.value <= short[1].value


def test_requests_that_share_all_steps_are_all_served_without_a_limit() -> None:
    assert served(clairvoyant_bound([TEN_STEPS] * 5, steps_of())) == 5


@pytest.mark.parametrize(
    ("capacity", "most"),
    [
        (steps_of(max_num_seqs=2), 2),
        # Contexts of 4 to 13 tokens sum to 85 a request; the pool holds 13 in each of ten steps.
        (steps_of(kv_tokens=13), 130 / 85),
        # One prompt fits into the first step.
        (steps_of(max_step_tokens=4), 1),
    ],
    ids=["slots", "kv", "tokens"],
)
def test_each_limit_bounds_the_served_requests(capacity: Capacity, most: float) -> None:
    assert served(clairvoyant_bound([TEN_STEPS] * 5, capacity)) == pytest.approx(most, rel=0.06)


def test_two_replicas_serve_twice_as_many() -> None:
    one, two = (
        clairvoyant_bound([TEN_STEPS] * 9, steps_of(max_num_seqs=2), replicas=replicas)
        for replicas in (1, 2)
    )
    assert (served(one), served(two)) == (2, 4)


def test_more_replicas_do_not_serve_one_request_faster() -> None:
    late = replace(TEN_STEPS, e2e_s=0.009)
    assert served(clairvoyant_bound([late], steps_of(), replicas=8)) == 0


def test_the_bound_maximises_the_weight() -> None:
    light = [replace(TEN_STEPS, weight=1)] * 3
    heavy = [replace(TEN_STEPS, weight=5)]
    assert served(clairvoyant_bound([*light, *heavy], steps_of(max_num_seqs=2))) == 6


def test_a_request_without_deadline_is_always_served() -> None:
    patient = Demand(arrival_s=0, prompt_tokens=4, output_tokens=10)
    assert served(clairvoyant_bound([patient] * 5, steps_of(max_num_seqs=1))) == 5
    bound = clairvoyant_bound([patient, *[TEN_STEPS] * 4], steps_of(max_num_seqs=1))
    assert served(bound) == 2


def test_a_ttft_target_without_a_tpot_target_limits_the_prompts_only() -> None:
    quick = Demand(arrival_s=0, prompt_tokens=4, output_tokens=10, ttft_s=0.003)
    assert served(clairvoyant_bound([quick] * 5, steps_of(max_num_seqs=1))) == 3


def test_no_requests_have_a_bound_of_zero() -> None:
    assert clairvoyant_bound([], steps_of()).certificate == 0
    assert informed_bound([], steps_of()).certificate == 0
    assert best_schedule([], load_profile("unit")).value == 0


def test_requests_without_weight_have_a_bound_of_zero() -> None:
    bound = clairvoyant_bound([replace(TEN_STEPS, weight=0)] * 2, steps_of())
    assert (bound.certificate, bound.surplus) == (0, (0, 0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_tokens", 0),
        ("output_tokens", 0),
        ("ttft_s", -1.0),
        ("tpot_s", math.nan),
        ("weight", math.nan),
        ("weight", math.inf),
        ("arrival_s", math.inf),
        ("reusable_tokens", 4),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(TEN_STEPS, **{field: value})  # type: ignore[arg-type]


def test_tokens_in_the_prefix_cache_need_no_computation() -> None:
    capacity = Capacity(steps=(StepBound(step_s=1e-4), StepBound(prompt_token_s=0.001)))
    full = Demand(arrival_s=0, prompt_tokens=50, output_tokens=1, ttft_s=0.1)
    hit = replace(full, reusable_tokens=40)
    assert served(clairvoyant_bound([full] * 20, capacity)) == 2
    assert served(clairvoyant_bound([hit] * 20, capacity)) == 10


def test_only_prefixes_that_another_request_has_are_reusable() -> None:
    def request(*hashes: int) -> OfferedRequest:
        return OfferedRequest(
            arrival_ns=0,
            prompt_tokens=1000,
            output_tokens=5,
            max_tokens=5,
            slo_class="all",
            targets=Targets(ttft_ns=NS_PER_S),
            hashes=hashes,
            block_size=256,
        )

    demands = demands_of([request(1, 2, 3), request(1, 2, 4), request(9, 2, 3), request()])
    assert [d.reusable_tokens for d in demands] == [512, 512, 0, 0]
    assert demands_of([request(1, 2, 3, 4)] * 2)[0].reusable_tokens == 999


DECODES_ONLY = Capacity(steps=(StepBound(step_s=1e-6), StepBound(decode_s=0.01)))


def exponential(count: int, mean: float, rate: float) -> list[Demand]:
    """Return requests with evenly spaced arrivals and the quantiles of an exponential length."""
    lengths = [1 + round(-mean * math.log(1 - (i + 0.5) / count)) for i in range(count)]
    random.Random(1).shuffle(lengths)
    return [
        Demand(arrival_s=i / rate, prompt_tokens=1, output_tokens=n, e2e_s=20, kind="any")
        for i, n in enumerate(lengths)
    ]


def test_exponential_lengths_at_four_times_the_load() -> None:
    """Source: ∫ l·exp(−l) up to the longest served length is 1/4; that serves 1 − exp(−0.961)."""
    mean, count = 100, 2400
    rate = 4 / (mean * 0.01)
    demands = exponential(count, mean, rate)
    # The last deadline is 20 s after the last arrival, so there is a little more capacity.
    capacity = (count / rate + 20) / (count * mean * 0.01)
    known = clairvoyant_bound(demands, DECODES_ONLY, intervals=40).certificate / count
    hidden = informed_bound(demands, DECODES_ONLY, intervals=40).certificate / count
    assert capacity == pytest.approx(0.258, abs=0.001)
    assert known == pytest.approx(0.62, abs=0.02)
    assert capacity * 0.99 <= hidden <= capacity * 1.06


def test_known_and_hidden_lengths_are_the_same_if_all_are_equal() -> None:
    demands = [replace(d, output_tokens=50) for d in exponential(200, 50, 8)]
    known = clairvoyant_bound(demands, DECODES_ONLY).certificate
    hidden = informed_bound(demands, DECODES_ONLY).certificate
    assert hidden == pytest.approx(known, rel=0.01)
    assert known < 190


def test_a_blind_policy_pays_for_requests_that_go_on() -> None:
    """One decode ends half of the requests; the other half needs ten more."""
    demands = [
        Demand(arrival_s=0, prompt_tokens=1, output_tokens=n, e2e_s=1, kind="k")
        for n in (2, 12)
        for _ in range(100)
    ]
    # 100 decodes fit into the second: known, all short ones; hidden, one decode each of 100.
    assert clairvoyant_bound(demands, DECODES_ONLY).certificate == pytest.approx(100, rel=0.01)
    assert informed_bound(demands, DECODES_ONLY).certificate == pytest.approx(50, rel=0.01)


def test_hidden_lengths_come_from_the_given_distribution() -> None:
    demands = [Demand(arrival_s=0, prompt_tokens=1, output_tokens=2, e2e_s=1, kind="k")] * 200
    lengths = {"k": [2, 12]}
    bound = informed_bound(demands, DECODES_ONLY, lengths=lengths)
    assert bound.certificate == pytest.approx(50, rel=0.01)


@settings(deadline=None, max_examples=examples(30))
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(2, 40),
)
def test_no_blind_policy_beats_the_informed_bound(
    lengths: list[int], quantum: int, budget: int
) -> None:
    """Policies that give each request up to `quantum` decodes, one request after the other."""
    count = 6
    demand = Demand(arrival_s=0, prompt_tokens=1, output_tokens=1, e2e_s=budget * 0.01, kind="k")
    bound = informed_bound([demand] * count, DECODES_ONLY, lengths={"k": lengths})
    rng = random.Random(7)
    total, runs = 0, 400
    for _ in range(runs):
        left = budget
        for _ in range(count):
            needed = rng.choice(lengths) - 1
            spent = min(needed, quantum, left)
            left -= spent
            total += spent == needed
    assert total / runs <= bound.certificate + 0.35  # four standard errors


def test_ranges_of_lengths_keep_the_probabilities() -> None:
    demand = Demand(arrival_s=0, prompt_tokens=9, output_tokens=1, e2e_s=99, kind="k")
    lengths = [1, 1, 3, 7, 7, 40, 500]
    stages = hidden_stages([demand], Resources(DECODES_ONLY, 1), {"k": lengths})
    reach = np.concatenate([[1], np.cumprod(stages.survive)[:-1]])
    assert (stages.gain * reach).sum() == pytest.approx(1)
    assert (stages.steps * reach)[1:].sum() == pytest.approx(np.mean(lengths) - 1)
    assert stages.survive[-1] == pytest.approx(0, abs=1e-12)


def test_prices_from_a_sample_give_nearly_the_same_bound() -> None:
    rng = random.Random(5)
    demands = [
        Demand(
            arrival_s=rng.random() * 20,
            prompt_tokens=rng.randint(50, 2000),
            output_tokens=rng.randint(5, 150),
            ttft_s=0.6,
            tpot_s=0.05,
        )
        for _ in range(800)
    ]
    capacity = capacity_of(load_profile("llama-3-8b-h100"), max_num_seqs=256)
    whole = clairvoyant_bound(demands, capacity, intervals=60, pairs=10**9)
    sample = clairvoyant_bound(demands, capacity, intervals=60, pairs=2_000)
    assert (whole.sampled, sample.sampled) == (False, True)
    assert whole.certificate <= sample.certificate + CLOSE <= 1.02 * whole.certificate
    assert whole.certificate < 0.99 * len(demands)


def test_longer_intervals_do_not_lower_the_bound() -> None:
    demands = [
        Demand(arrival_s=i * 0.013, prompt_tokens=1024, output_tokens=60, ttft_s=0.5, tpot_s=0.05)
        for i in range(150)
    ]
    capacity = capacity_of(load_profile("llama-3-8b-h100"))
    exact, coarse = (
        clairvoyant_bound(demands, capacity, intervals=count, pairs=10**9).certificate
        for count in (1000, 10)
    )
    assert exact <= coarse * 1.0001


def test_the_command_prints_bound_and_schedule_of_each_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--quick", "--json", "--rounds", "2"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["load"] for row in rows] == ["chat 40/s", "generator, seed 7"]
    for row in rows:
        assert 0 < row["schedule"] <= row["certificate"] <= row["weight"] + CLOSE
        assert row["informed"] <= row["certificate"]
    assert rows[1]["schedule"] >= 68


@pytest.mark.parametrize("text", ["x", "0", "30,-1", "1/0"])
def test_the_command_rejects_what_is_no_rate(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rates", text])
    assert "is not a list of numbers above 0" in capsys.readouterr().err


def test_the_command_reads_a_window_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trace", "sample", "--window", "0s..20s", "--rate-scale", "4", "--rounds", "1"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2
    assert table[1].startswith("sample × 4")


def test_the_command_names_a_missing_trace_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nothing\.parquet: no such file"):
        main(["--trace", str(tmp_path / "nothing.parquet")])


def test_the_command_names_an_unknown_window(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--trace", "sample", "--window", "ten minutes"])
    assert "'ten minutes' is not a window" in capsys.readouterr().err
