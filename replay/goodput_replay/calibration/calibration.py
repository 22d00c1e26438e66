"""The calibration of a device profile: from the requests of runs to a law and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.errors import InputError
from goodput_core.quantiles import P50, P95, quantiles
from goodput_core.spec.choices import ControlMode, Policy
from goodput_core.steptime import StepShape
from goodput_core.steptime.fitting import errors_ppm
from goodput_engine.core.build import configuration
from goodput_engine.device.fit import FittedForm, FormChoice, fit_form, save_profile
from goodput_engine.device.load import COMMON_NUMBERS, load_profile
from goodput_engine.device.profile import Overlap
from goodput_replay.calibration.prediction import (
    LatencyError,
    compare_latencies,
    completed_pairs,
    mean_error,
    predict,
)
from goodput_replay.calibration.requests import ObservedRequest
from goodput_replay.calibration.server_limits import (
    infer_engine,
    largest_step,
    next_power,
    plans_ahead,
    saturated_budget,
)
from goodput_replay.calibration.steps import (
    Chunks,
    ObservedStep,
    ReplicaSteps,
    allot_prompts,
)
from goodput_replay.runs.slo import SLOClasses, slo_classes

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService
    from goodput_core.spec.workloads import EngineSpec
    from goodput_core.steptime.fitting import StepSample
    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Configure
    from goodput_replay.calibration.prediction import RecordPair

__all__ = ["CalibratedDevice", "ObservedRun", "calibrate", "write_profile"]

_MIN_STEPS: Final = 200
_SECTIONS: Final = 10
"""Sections of a run; every other one is held out."""
# Steps whose time differs from the first fit by more than this are disturbed or misunderstood: the
# multiple of the median error, at least the share in millionths.
_OUTLIER: Final = 5
_MIN_OUTLIER_PPM: Final = 20_000
_MIN_BUSY_PROMPTS: Final = 50
# Steps that only decode are many and alike. A fit takes this many for each step with a prompt.
_DECODES_PER_PROMPT: Final = 3
_MIN_DECODES: Final = 2_000
_ROUNDS: Final = 4
"""Rounds in which the prompts of each step and the law are estimated from each other."""
_NEARLY: Final = 0.97
"""A step that takes less than the inverse of this times the time of its decodes has no prompt."""
# Without a base profile, the memory is assumed to hold this many times the tokens of the run.
_SPARE_KV: Final = 4
_BLOCK_SIZE: Final = 16
# A limit of running requests must make the error this much smaller: as a factor, and absolutely.
_CLEARLY: Final = 0.95
_MIN_GAIN: Final = 0.005
# Requests of a replica with which the limit is determined.
_MAX_COMPARED: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run to calibrate with.

    Args:
        folder: its folder.
        requests: its requests with tokens, at least one.
        end_ns: end of the last one.
    """

    folder: Path
    requests: Sequence[ObservedRequest]
    end_ns: int = field(init=False)

    def __post_init__(self) -> None:
        """Find the end of the last request."""
        end_ns = max(int(one.times_ns[-1]) for one in self.requests)
        object.__setattr__(self, "end_ns", end_ns)

    def section(self, at_ns: int) -> int:
        """Return the number of the section that has a time."""
        start_ns = self.requests[0].arrival_ns
        return (at_ns - start_ns) * _SECTIONS // max(1, self.end_ns + 1 - start_ns)

    def is_held_out(self, at_ns: int) -> bool:
        """True if a time is in a section that is not fitted."""
        return self.section(at_ns) % 2 == 1

    def by_replica(self) -> list[list[ObservedRequest]]:
        """Return the requests of each replica."""
        found: dict[str, list[ObservedRequest]] = {}
        for one in self.requests:
            found.setdefault(one.record.replica, []).append(one)
        return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedDevice:
    """A calibrated profile.

    Args:
        form: the law of step times.
        overlap: combination of host time and device time.
        policy: the scheduling policy with which the run was predicted.
        token_budget: the token budget of the server, given or inferred.
        max_num_seqs: the largest number of running requests, given or inferred.
        requests: number of requests.
        replicas: number of replicas.
        steps: number of reconstructed steps.
        held_out_steps: number of steps that were excluded from the fit.
        slowdown: how many times as long the same decodes took in one section as in another one.
        p50_error_ppm, p95_error_ppm: quantiles of the absolute errors for held-out steps, in
            millionths of the measured time.
        delay_ns: median time of a request on its way to an idle server, not part of the profile.
        held_out_requests: number of requests in the held-out sections.
        latencies: errors of the predicted latencies of these requests.
        numbers: all other numbers of the profile, each with its origin.
    """

    form: FittedForm
    overlap: Overlap
    policy: Policy
    token_budget: int
    max_num_seqs: int
    requests: int
    replicas: int
    steps: int
    held_out_steps: int
    slowdown: float
    p50_error_ppm: int
    p95_error_ppm: int
    delay_ns: int
    held_out_requests: int
    latencies: Sequence[LatencyError]
    numbers: Mapping[str, tuple[float, str]]


@dataclass(slots=True, kw_only=True)
class _SplitSteps:
    """The steps of all replicas, in the fitted and in the held-out sections."""

    training: list[ObservedStep] = field(default_factory=list)
    held_out: list[ObservedStep] = field(default_factory=list)


def calibrate(
    runs: Sequence[ObservedRun],
    *,
    choice: FormChoice,
    service: LLMService | None,
    base: DeviceProfile | None,
) -> CalibratedDevice:
    """Fit a law to half of the runs, and predict the other half.

    Args:
        runs: the runs, at least one.
        choice: the form of the law.
        service: the manifest of the server; None to infer its limits from the runs.
        base: profile with the numbers that records do not show; None to assume them.

    Raises:
        InputError: the runs do not determine a law.
    """
    replicas = [(run, ReplicaSteps.of(requests)) for run in runs for requests in run.by_replica()]
    observed = [steps for _, steps in replicas]
    estimates = [_first_estimates(one) for one in observed]
    delay_ns = 0
    for number in range(_ROUNDS):
        chunks = [
            allot_prompts(one, tokens, delay_ns)
            for one, tokens in zip(observed, estimates, strict=True)
        ]
        budget = saturated_budget(observed, chunks)
        steps = _collect(replicas, chunks, budget)
        is_last = number == _ROUNDS - 1
        form = _fit(steps.training if is_last else _certain(steps.training), choice, runs)
        delay_ns = _delay_ns(form, steps.training)
        estimates = [_estimates(form, one) for one in observed]
    errors = errors_ppm(form, [one.sample for one in _usable(steps.held_out)])
    p50, p95 = quantiles(errors, (P50, P95)) if errors else (0, 0)
    overlap = Overlap.MAX if plans_ahead(observed, delay_ns) else Overlap.ADD
    numbers = _numbers(runs, base)
    profile = _profile(form, overlap, numbers)
    if service is None:
        engine = infer_engine(observed, budget or next_power(largest_step(observed, chunks)))
        engine = _limited(engine, max(one.peak_decodes for one in observed), runs, profile)
    else:
        engine = service.spec.engine
    predicted = _predict(runs, held_out=True, profile=profile, engine=engine, service=service)
    return CalibratedDevice(
        form=form,
        overlap=overlap,
        policy=engine.policy,
        token_budget=engine.token_budget.initial,
        max_num_seqs=engine.max_num_seqs,
        requests=sum(len(run.requests) for run in runs),
        replicas=len(replicas),
        steps=len(steps.training) + len(steps.held_out),
        held_out_steps=len(steps.held_out),
        slowdown=max(steps.slowdown(run.section) for run, steps in replicas),
        p50_error_ppm=p50,
        p95_error_ppm=p95,
        delay_ns=delay_ns,
        held_out_requests=sum(
            run.is_held_out(one.arrival_ns) for run in runs for one in run.requests
        ),
        latencies=compare_latencies(predicted),
        numbers=numbers,
    )


def write_profile(found: CalibratedDevice, *, runs: Sequence[ObservedRun], out: Path) -> None:
    """Write the profile.

    Raises:
        InputError: the file exists or cannot be written.
    """
    names = ", ".join(run.folder.name for run in runs)
    save_profile(
        found.form,
        origin=(
            f"calibrated with {found.steps:,} steps of {names}; held-out step error p50 "
            f"{found.p50_error_ppm / 10_000:.2f} %, p95 {found.p95_error_ppm / 10_000:.2f} %"
        ),
        description=f"Step times calibrated with the requests of {names}.",
        overlap=found.overlap,
        numbers=found.numbers,
        out=out,
    )


def _first_estimates(steps: ReplicaSteps) -> list[float]:
    """Return the prompt tokens of each step, if each took equally long beside the decodes."""
    times_ns = steps.ends_ns - steps.starts_ns
    excess_ns = np.maximum(times_ns * _NEARLY - steps.decode_times_ns(), 0)
    excess_ns[steps.without_prompts()] = 0
    tokens = sum(one.prompt_tokens - one.cached_tokens for one in steps.requests)
    found: list[float] = (excess_ns / max(1.0, float(excess_ns.sum()) / tokens)).tolist()
    return found


def _estimates(form: FittedForm, steps: ReplicaSteps) -> list[float]:
    """Return the prompt tokens with which the law predicts the time of each step.

    A law whose prompts take no time permits any number; all prompts are then the most.
    """
    most = sum(one.prompt_tokens for one in steps.requests)
    found: list[float] = []
    for decodes, context, time_ns in zip(
        steps.decodes.tolist(),
        steps.contexts.tolist(),
        (steps.ends_ns - steps.starts_ns).tolist(),
        strict=True,
    ):
        beside = StepShape.of(decodes=decodes, decode_context_tokens=context)
        only_decodes = decodes and form.step_ns(beside) >= time_ns * _NEARLY
        found.append(0.0 if only_decodes else min(most, form.chunk_within(beside, 0, time_ns)))
    return found


def _collect(
    replicas: Sequence[tuple[ObservedRun, ReplicaSteps]],
    chunks: Sequence[Chunks],
    budget: int | None,
) -> _SplitSteps:
    """Return the steps of all replicas."""
    found = _SplitSteps()
    for (run, steps), parts in zip(replicas, chunks, strict=True):
        for one in steps.observed(parts, budget):
            held_out = run.is_held_out(one.end_ns)
            (found.held_out if held_out else found.training).append(one)
    return found


def _certain(steps: Sequence[ObservedStep]) -> Sequence[ObservedStep]:
    """Return the steps whose prompts are certain, if there are enough with prompts.

    A wrong law distributes a prompt over several steps so that it seems right.
    """
    certain = [one for one in steps if one.certain]
    prompts = sum(one.sample.shape.prefill_tokens > 0 for one in certain)
    return certain if prompts >= _MIN_BUSY_PROMPTS else steps


def _usable(steps: Sequence[ObservedStep]) -> list[ObservedStep]:
    """Return the steps whose time is that of the device alone, if there are enough with prompts."""
    busy = [one for one in steps if not one.after_idle]
    prompts = sum(one.sample.shape.prefill_tokens > 0 for one in busy)
    return busy if prompts >= _MIN_BUSY_PROMPTS else list(steps)


def _balanced(steps: Sequence[ObservedStep]) -> list[StepSample]:
    """Return all steps with prompts, and some of those that only decode."""
    decoding = [one.sample for one in steps if not one.sample.shape.prefill_tokens]
    prompts = [one.sample for one in steps if one.sample.shape.prefill_tokens]
    most = max(_MIN_DECODES, _DECODES_PER_PROMPT * len(prompts))
    return [*prompts, *decoding[:: max(1, -(-len(decoding) // most))]]


def _fit(
    steps: Sequence[ObservedStep], choice: FormChoice, runs: Sequence[ObservedRun]
) -> FittedForm:
    """Fit the law twice, the second time without the steps that contradict the first one."""
    samples = _balanced(_usable(steps))
    where = ", ".join(str(run.folder) for run in runs)
    if len(samples) < _MIN_STEPS:
        raise InputError(
            f"{where}: half of the run shows {len(samples)} steps of the server; a calibration "
            f"needs {_MIN_STEPS}: replay a longer window"
        )
    try:
        form = _fit_once(samples, choice)
        kept = [
            one
            for with_prompt in (False, True)
            for one in _without_outliers(
                form,
                [one for one in samples if bool(one.shape.prefill_tokens) == with_prompt],
            )
        ]
        return _fit_once(kept, choice)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def _without_outliers(form: FittedForm, samples: Sequence[StepSample]) -> list[StepSample]:
    """Return the steps whose errors are similar to the median error."""
    errors = errors_ppm(form, samples)
    most = max(_OUTLIER * median(errors), _MIN_OUTLIER_PPM) if errors else 0
    return [one for one, error in zip(samples, errors, strict=True) if error <= most]


def _fit_once(samples: Sequence[StepSample], choice: FormChoice) -> FittedForm:
    try:
        return fit_form(samples, choice)
    except ValueError:
        if choice is not FormChoice.AUTO:
            raise
        # A run may lie on one side of a roofline's bend. A curve needs no bend.
        return fit_form(samples, FormChoice.PIECEWISE)


def _delay_ns(form: FittedForm, steps: Sequence[ObservedStep]) -> int:
    """Return how much longer steps take after idle time, which is the way to the server."""
    delays = [
        step_ns - form.step_ns(shape)
        for (shape, step_ns), _, certain, after_idle in steps
        if after_idle and certain
    ]
    return max(0, round(median(delays))) if delays else 0


def _numbers(
    runs: Sequence[ObservedRun], base: DeviceProfile | None
) -> dict[str, tuple[float, str]]:
    """Return the numbers that records do not show, from a profile or assumed."""
    contained = "contained in the calibrated step times"
    host: dict[str, tuple[float, str]] = {
        "host_ms_per_step": (0, contained),
        "host_us_per_request": (0, contained),
    }
    if base is not None:
        return {
            name: (base.numbers[name], f"{base.name}: {base.provenance[name]}")
            for name in COMMON_NUMBERS
            if name in base.numbers
        } | host
    longest = max(
        one.prompt_tokens + one.record.output_tokens for run in runs for one in run.requests
    )
    peak = max(_peak_tokens(requests) for run in runs for requests in run.by_replica())
    return {
        **host,
        "kv_blocks": (
            max(1, _SPARE_KV * peak // _BLOCK_SIZE),
            f"assumed: {_SPARE_KV} times the {peak:,} tokens that were in use at once",
        ),
        "block_size": (_BLOCK_SIZE, "assumed"),
        "kv_bytes_per_token": (131_072, "assumed: a model of 8B parameters with 8 KV heads"),
        "max_model_tokens": (
            max(4096, next_power(longest)),
            f"assumed: more than the {longest:,} tokens of the longest request",
        ),
        "vocab_size": (128_256, "assumed"),
        "tensor_parallel": (1, "assumed: one device"),
        "swap_gb_per_s": (25, "assumed"),
        "link_gb_per_s": (25, "assumed"),
        "startup_seconds": (60, "assumed"),
    }


def _peak_tokens(requests: Sequence[ObservedRequest]) -> int:
    """Return the largest sum of the lengths of requests that ran at once."""
    changes: list[tuple[int, int]] = []
    for one in requests:
        tokens = one.prompt_tokens + one.record.output_tokens
        changes += [(one.arrival_ns, tokens), (int(one.times_ns[-1]), -tokens)]
    used = peak = 0
    for _, tokens in sorted(changes):
        used += tokens
        peak = max(peak, used)
    return peak


def _profile(
    form: FittedForm, overlap: Overlap, numbers: Mapping[str, tuple[float, str]]
) -> DeviceProfile:
    """Return the profile as a user loads it from its file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "calibrated.yaml"
        save_profile(
            form,
            origin="calibrated",
            description="calibrated",
            overlap=overlap,
            numbers=numbers,
            out=path,
        )
        return load_profile(str(path))


def _limited(
    engine: EngineSpec, peak: int, runs: Sequence[ObservedRun], profile: DeviceProfile
) -> EngineSpec:
    """Return the engine with a limit of running requests if it predicts the fitted half better.

    The limit is the largest number of requests that decoded at once.
    """
    candidates = (engine, replace(engine, max_num_seqs=max(1, peak)))
    without, limited = (
        mean_error(
            _predict(
                runs, held_out=False, profile=profile, engine=one, service=None, most=_MAX_COMPARED
            )
        )
        for one in candidates
    )
    return candidates[limited < _CLEARLY * without - _MIN_GAIN]


def _predict(
    runs: Sequence[ObservedRun],
    *,
    held_out: bool,
    profile: DeviceProfile,
    engine: EngineSpec,
    service: LLMService | None,
    most: int | None = None,
) -> list[RecordPair]:
    """Serve all runs in virtual time; return the records of the held-out or of the fitted half.

    Args:
        runs: the runs.
        held_out: True for the held-out half.
        profile: the calibrated profile.
        engine: settings of the server.
        service: its manifest; None without one.
        most: number of requests of each replica, from the first one on; None for all.
    """
    slo = SLOClasses() if service is None else slo_classes(service.spec.slo)
    mode = ControlMode.MANUAL if service is None else service.spec.control.mode
    configure: Configure = configuration(engine, mode=mode, device="calibrated")
    pairs: list[RecordPair] = []
    for run in runs:
        for requests in run.by_replica():
            records = predict(requests[:most], profile=profile, configure=configure, slo=slo)
            half = [one for one in requests if run.is_held_out(one.arrival_ns) == held_out]
            pairs += completed_pairs(half, records)
    return pairs
