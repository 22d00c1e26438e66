"""The check before a run that it can be compared with earlier runs.

A baseline that is missing, damaged or of other requests is thus found before a request is sent, not
after the hours of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.errors import InputError
from goodput_replay.compare.recorded_baseline import find_recorded_runs, load_recorded_runs
from goodput_replay.compare.recording import RECORDED_FILES
from goodput_replay.compare.runs import difference_between, load_run
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE
from goodput_replay.runs.rounding import seconds
from goodput_replay.runs.summary import (
    EmulationSummary,
    RunSummary,
    SLOSummary,
    TargetSummary,
    TraceSummary,
    WindowSummary,
)
from goodput_replay.runs.summary_builder import summarise_targets
from goodput_replay.storage import FolderCopies

if TYPE_CHECKING:
    from goodput_replay.runs.summary_builder import RunInfo

__all__ = ["RunInputs", "require_comparable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The fields of a run's summary that are known before its first request."""

    trace: TraceSummary
    target: TargetSummary
    run: RunSummary
    window: WindowSummary
    promises: tuple[SLOSummary, ...]
    default_class: str | None
    outage_s: int
    emulation: EmulationSummary | None

    @classmethod
    def of(cls, info: RunInfo) -> RunInputs:
        """Return the inputs of a run."""
        return cls(
            trace=info.trace,
            target=info.target,
            run=info.run,
            window=WindowSummary(
                start_s=seconds(info.window_start_ns),
                length_s=seconds(info.window_ns),
                rows_planned=info.rows_planned,
                rows_sent=0,
                warmup_rows=info.warmup_rows,
            ),
            promises=tuple(map(summarise_targets, info.slo.classes)),
            default_class=info.slo.default,
            outage_s=info.slo.outage_s,
            emulation=info.emulation,
        )


def require_comparable(
    inputs: RunInputs, *, baseline: str | None, recorded: str | None, revision: str | None = None
) -> None:
    """Reject a run that `replay gate` could not compare with earlier runs.

    Args:
        inputs: the run.
        baseline: folder of an earlier run, or its place in object storage; None for the latest one
            in `recorded` that fits.
        recorded: folder of recordings of the baseline with itself; None for none.
        revision: revision that must have served the recordings; None if any may have.

    Raises:
        UsageError: a URI is not that of a supported store.
        InputError: the baseline is missing, damaged, invalid or of other requests; or too few
            recordings fit.
        UnreachableError: the object storage could not be read.
    """
    if baseline is None and recorded is None:
        return
    with FolderCopies() as copies:
        try:
            _require_comparable(inputs, baseline, recorded, revision, copies)
        except InputError as error:
            raise InputError(copies.with_uris(str(error))) from error


def _require_comparable(
    inputs: RunInputs,
    baseline: str | None,
    recorded: str | None,
    revision: str | None,
    copies: FolderCopies,
) -> None:
    history = None
    if recorded is not None:
        history = copies.folder(recorded, names=RECORDED_FILES, deep=True)
    if baseline is not None:
        folder = copies.folder(baseline, names=(SUMMARY_FILE, RECORDS_FILE))
    else:
        assert history is not None
        folder = find_recorded_runs(history, revision, inputs)[0]
    run = load_run(folder)
    if difference := difference_between(inputs, run.summary):
        raise InputError(
            f"the run cannot be compared with {folder}: {difference}; replay the same trace with "
            "the same options and SLO, or name another baseline"
        )
    if not run.summary.validity.valid:
        raise InputError(
            f"the run cannot be compared with {folder}, which is INVALID: "
            f"{run.summary.validity.sentence}; name a valid run"
        )
    if history is not None:
        load_recorded_runs(history, inputs, [run], revision=revision)
