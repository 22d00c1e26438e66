"""From the step log of a real model to a profile, and its predictions for loads that it never saw.

An engine computes a small random model and serves loads in turn: one for the fit, one held out, and
so on, so that both halves meet the same disturbances of the machine. `goodput device fit` gets only
the steps of the first half. Its profile then predicts the steps of the other half and, in virtual
time, the latencies of their requests.

Other work can slow the machine down several times within seconds, and a profile has the mean of its
half. Each held-out round is therefore compared with the profile at the speed of the machine: that
of the round before it for its steps, and its own for the latencies.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from benchmarks.twin import completed, fit, latencies_ms, replay, write_base
from tests.builders.torch_models import make_folder
from tests.engine.conftest import EngineStarter

from goodput_core.steptime.fitting import StepSample
from goodput_engine.device.load import load_profile
from goodput_engine.device.step_log import read_step_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_core.steptime import StepShape

    StepLaw = Callable[[StepShape], float]

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = 4
LOAD = (
    *("--rate", "2/s", "--duration", "6s"),  # far from saturation, where queues are sensitive
    *("--input-tokens", "120~60%", "--output-tokens", "20~60%"),
)
BOUND = 0.4
"""Largest relative error. Means are compared because the fit keeps them: a busy machine
delays single steps by a multiple of their time, and the median has no part of that. A profile of
0.4 or 2.5 times the speed is outside of this bound, and so is one time for all steps."""
PREDICTED = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT"}
"""Latencies whose means are compared, by their names in `latencies_ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedHalves:
    """An engine's runs of both halves, and the profile that was fitted to one of them.

    Args:
        folder: has the runs, named after their half and round.
        profile: the fitted profile.
        fitted, held_out: the steps of the halves, by round.
    """

    folder: Path
    profile: Path
    fitted: list[list[StepSample]]
    held_out: list[list[StepSample]]

    @property
    def law(self) -> StepLaw:
        """The fitted law of step times, in nanoseconds."""
        return load_profile(str(self.profile)).form.step_ns

    def errors(self, factor: float) -> dict[str, float]:
        """Let the twin serve the held-out loads, and return the errors of its means.

        Args:
            factor: multiple of the step times of the profile.
        """
        pooled: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in PREDICTED}
        for number in range(ROUNDS):
            measured = self.folder / f"held-out-{number}"
            name = f"twin-{factor}-{number}"
            slowness = factor * slowness_of(self.held_out[number], self.law)
            profile = with_slowness(self.profile, slowness, self.folder / f"{name}.yaml")
            twin = replay(
                self.folder / name,
                *load_of("held-out", number),
                *("--emulate", str(self.folder / "0.yaml"), "--device", str(profile)),
            )
            ids = completed(measured) & completed(twin)
            for at, run in enumerate((measured, twin)):
                for kind, values in latencies_ms(run, ids).items():
                    pooled[kind][at].extend(values)
        assert len(pooled["ttft"][0]) >= 30
        return {
            title: fmean(pooled[kind][1]) / fmean(pooled[kind][0]) - 1
            for kind, title in PREDICTED.items()
        }


def load_of(half: str, number: int) -> list[str]:
    """Return the options of `replay` for the load of a half and a round; no two loads are equal."""
    return [*LOAD, "--seed", str(number if half == "fit" else 100 + number)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedHalves:
    """Serve both halves with one engine, and fit a profile to the log of the first."""
    folder = tmp_path_factory.mktemp("twin")
    model = make_folder(
        folder / "model",
        "Llama",
        # Large enough that most of a step is arithmetic. `replay` sends token ids up to 32,000.
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        max_position_embeddings=1024,
        initializer_range=0.02,
    )
    log = folder / "steps.parquet"
    with closing(EngineStarter(folder)) as engines:
        engine = engines.start(
            *("--threads", "1", "--step-log", str(log)),
            # In a pod, the kernels of the attention are not measured.
            environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            source=f"file://{model}",
            realModel={"kvBlocks": 600},
            tokenBudget={"min": 64, "max": 512, "initial": 512},
        )
        base = write_base(folder / "base.yaml", engine.listening)
        spans_ns: dict[str, list[tuple[int, int]]] = {"fit": [], "held-out": []}
        for number in range(ROUNDS):
            for half, spans in spans_ns.items():
                began_ns = time.monotonic_ns()
                replay(
                    folder / f"{half}-{number}",
                    *load_of(half, number),
                    *("--target", engine.url, "--model", "chat"),
                )
                spans.append((began_ns, time.monotonic_ns()))
    fitted, held_out = (
        [
            read_step_log(write_steps_of(log, folder / f"{half}-{at}.parquet", [span]))
            for at, span in enumerate(of_half)
        ]
        for half, of_half in spans_ns.items()
    )
    profile = folder / "fitted.yaml"
    fit(write_steps_of(log, folder / "fit.parquet", spans_ns["fit"]), base, profile)
    return ServedHalves(folder=folder, profile=profile, fitted=fitted, held_out=held_out)


def write_steps_of(log: Path, out: Path, spans_ns: Sequence[tuple[int, int]]) -> Path:
    """Write the steps of a log that ended within spans of time."""
    table = pq.read_table(log)
    at_ns = np.array(table["at_ns"])
    inside = np.any([(began <= at_ns) & (at_ns < end) for began, end in spans_ns], axis=0)
    pq.write_table(table.filter(pa.array(inside)), out)
    return out


def slowness_of(steps: Sequence[StepSample], law: StepLaw) -> float:
    """Return the measured time of steps as a multiple of the predicted one."""
    return sum(one.step_ns for one in steps) / sum(law(one.shape) for one in steps)


def with_slowness(profile: Path, factor: float, out: Path) -> Path:
    """Write a profile whose steps take a multiple of the time."""
    values: dict[str, Any] = yaml.safe_load(profile.read_text(encoding="utf-8"))
    values["curve"]["step_ms"] = [factor * one for one in values["curve"]["step_ms"]]
    for name, number in values["numbers"].items():
        if name.startswith(("c2_", "c3_", "c4_")):
            number["value"] *= factor
    out.write_text(yaml.safe_dump(values), encoding="utf-8")
    return out


def only_decodes(shape: StepShape) -> bool:
    """True if a step computes no prompt."""
    return shape.num_tokens == shape.num_decodes


def has_prompt(shape: StepShape) -> bool:
    """True if most tokens of a step are those of prompts."""
    return shape.num_tokens > 64


def test_the_profile_has_the_mean_step_time_of_the_half_that_it_is_fitted_to(
    served: ServedHalves,
) -> None:
    steps = [one for steps in served.fitted for one in steps]
    assert len(steps) >= 200
    assert slowness_of(steps, served.law) == pytest.approx(1, abs=0.1)


def test_the_fitted_profile_predicts_the_steps_of_the_held_out_half(served: ServedHalves) -> None:
    def error(law: StepLaw, kind: Callable[[StepShape], bool]) -> float:
        """Return the median over rounds of the relative error of the mean step time."""
        errors: list[float] = []
        for before, held_out in zip(served.fitted, served.held_out, strict=True):
            steps = [one for one in held_out if kind(one.shape)]
            assert len(steps) >= 3
            errors.append(slowness_of(before, law) / slowness_of(steps, law) - 1)
        return abs(median(errors))

    usual_ns = fmean(one.step_ns for steps in served.fitted for one in steps)
    assert error(served.law, only_decodes) <= BOUND
    assert error(served.law, has_prompt) <= BOUND
    assert error(lambda _: usual_ns, has_prompt) > BOUND


def test_the_emulated_twin_predicts_the_latencies_of_the_held_out_half(
    served: ServedHalves,
) -> None:
    errors = served.errors(1)
    assert {name: error for name, error in errors.items() if abs(error) > BOUND} == {}


@pytest.mark.parametrize("factor", [0.4, 2.5], ids=["2.5 times as fast", "0.4 times as fast"])
def test_a_twin_of_another_speed_is_outside_of_the_bound(
    served: ServedHalves, factor: float
) -> None:
    errors = served.errors(factor)
    assert {name: error for name, error in errors.items() if abs(error) <= BOUND} == {}
