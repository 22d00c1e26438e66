"""`ab.json`: the plan and the progress of a comparison that was recorded by `replay ab`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from goodput_core.errors import InputError
from goodput_core.files import write_atomically
from goodput_core.slo.looks import look_confidences
from goodput_core.slo.pairs import MAX_PAIRS, RunSpread
from goodput_core.slo.targets import parse_confidence, parse_margin
from goodput_replay.compare.gate import RunPair
from goodput_replay.compare.pairing import match
from goodput_replay.compare.runs import (
    difference_between,
    load_run,
    missed_shares,
    reject_copies,
)
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE
from goodput_replay.runs.summary import read_summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.compare.runs import LoadedRun

__all__ = [
    "AB_FILE",
    "RECORDED_FILES",
    "ABRecording",
    "RecordedPair",
    "find_history",
    "is_recording",
    "read_history",
    "read_recording",
    "write_recording",
]

AB_FILE: Final = "ab.json"
RECORDED_FILES: Final = (AB_FILE, SUMMARY_FILE, RECORDS_FILE)
"""Names of the files of a recording that a comparison reads."""
_VERSION: Final = "1"
_MAX_BYTES: Final = 1 << 20
_MAX_RECORDINGS: Final = 1000
# A look that spends less of the permitted error decides nothing.
_MAX_LEVEL: Final = 1 - 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPair:
    """One pair of runs; the folders are relative to that of the recording."""

    order: Annotated[str, Meta(description="AB if the baseline ran first, otherwise BA.")]
    salt: Annotated[str, Meta(description="Salt of the prompts of both runs.")]
    baseline: Annotated[str, Meta(description="Folder of the baseline's run.")]
    candidate: Annotated[str, Meta(description="Folder of the candidate's run.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ABRecording:
    """The plan of a comparison, fixed before its first run, and the pairs recorded so far.

    Args:
        baseline: the baseline as on the command line: a manifest or a URL.
        candidate: the candidate.
        same_build: True if both sides are the same build (A/A).
        looks: number of pairs after which the comparison is judged, the last one the maximum.
        confidence: one-sided confidence over all looks, as '95%'.
        margin: acceptable loss of attainment, as '1%'.
        pairs: pairs recorded so far.
        recorded: True if the baseline's run is a copy of an earlier one.
        version: version of this schema.
    """

    baseline: str
    candidate: str
    same_build: bool
    looks: tuple[int, ...]
    confidence: str
    margin: str
    pairs: tuple[RecordedPair, ...] = ()
    recorded: bool = False
    version: str = _VERSION

    def confidence_now(self, confidence: Fraction) -> Fraction:
        """Return the confidence of the bounds after the recorded pairs.

        With several looks, the permitted error probability is spent over them. A recording that
        ended between two looks is judged as strictly as at the later one.

        Args:
            confidence: one-sided confidence over all looks.
        """
        if len(self.looks) < 2:
            return confidence
        levels = look_confidences(self.looks, float(confidence))
        at = next((i for i, look in enumerate(self.looks) if look >= len(self.pairs)), -1)
        return Fraction(min(levels[at], _MAX_LEVEL)).limit_denominator(10**9)

    def run_pairs(self, folder: Path) -> list[RunPair]:
        """Return the recorded pairs of the recording in `folder`."""
        return [
            RunPair(candidate=folder / pair.candidate, baseline=folder / pair.baseline)
            for pair in self.pairs
        ]


def is_recording(folder: Path) -> bool:
    """Return True if the folder was written by `replay ab`."""
    return (folder / AB_FILE).is_file()


def write_recording(folder: Path, recording: ABRecording) -> None:
    """Write `ab.json` atomically."""
    data = msgspec.json.format(msgspec.json.encode(recording), indent=2)
    write_atomically(folder / AB_FILE, data + b"\n")


def read_recording(folder: Path) -> ABRecording:
    """Read the recording in `folder`.

    Raises:
        InputError: the file is missing, too large, or not a recording.
    """
    path = folder / AB_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or 'cannot be read'}; give a folder of `replay ab`"
        ) from error
    try:
        if len(data) > _MAX_BYTES:
            raise msgspec.DecodeError("the file is too large")
        recording = msgspec.json.decode(data, type=ABRecording)
        _check(recording)
    except (msgspec.DecodeError, ValueError) as error:
        raise InputError(f"{path}: not a recording of `replay ab` ({error})") from error
    return recording


def find_history(folder: Path) -> list[tuple[Path, ABRecording]]:
    """Return the recordings of a history, each with its folder.

    Args:
        folder: a recording of `replay ab`, or a folder of recordings.

    Raises:
        InputError: there are no recordings, or one compares two different builds.
    """
    folders = [folder] if is_recording(folder) else _recordings(folder)
    found = [(one, read_recording(one)) for one in folders]
    for one, recording in found:
        if not recording.same_build:
            raise InputError(
                f"{one}: compares {recording.baseline} and {recording.candidate}; a history needs "
                "pairs of one build with itself, such as `replay ab -f a.yaml -f a.yaml`"
            )
    return found


def read_history(folder: Path, judged: Sequence[LoadedRun]) -> dict[str, RunSpread]:
    """Return the spread between recorded A/A pairs by class.

    Args:
        folder: a recording of `replay ab`, or a folder of recordings.
        judged: runs that are judged, at least one. The runs of the history must have served the
            same requests, and must not be judged themselves.

    Raises:
        InputError: there are no recordings, one compares two different builds, or a run of one is
            invalid, judged itself, given twice, or of other requests.
    """
    differences: dict[str, list[float]] = {}
    missed: dict[str, list[float]] = {}
    known = list(judged)
    for one, recording in find_history(folder):
        for pair in recording.run_pairs(one):
            runs = _load_earlier(pair, judged)
            known += runs
            matching = match(*runs)
            for name in runs[0].class_names:
                counts = matching.counts(name)
                if total := sum(counts.total):
                    change = sum(counts.gained) - sum(counts.lost)
                    differences.setdefault(name, []).append(change / total)
                    missed.setdefault(name, []).extend(missed_shares(runs, name))
    reject_copies(known)
    spreads = {
        name: RunSpread.of(values, fmean(missed[name]))
        for name, values in differences.items()
        if len(values) > 1
    }
    if not spreads:
        raise InputError(f"{folder}: a history needs at least two recorded pairs of one build")
    return spreads


def _load_earlier(pair: RunPair, judged: Sequence[LoadedRun]) -> tuple[LoadedRun, LoadedRun]:
    """Load a pair of a history, the baseline first.

    Raises:
        InputError: a run is invalid, judged itself, or of other requests.
    """
    assert pair.baseline is not None
    like = judged[0]
    folders = {run.folder.resolve() for run in judged}
    runs = load_run(pair.baseline), load_run(pair.candidate)
    for run in runs:
        if run.folder.resolve() in folders:
            raise InputError(f"{run.folder}: a judged run cannot be part of its own history")
        if not run.summary.validity.valid:
            raise InputError(f"{run.folder}: an invalid run cannot be part of a history")
        if reason := difference_between(like.summary, run.summary):
            raise InputError(
                f"{run.folder} cannot be the history of {like.folder}: {reason}; record the "
                "history with the same trace and options"
            )
    return runs


def _check(recording: ABRecording) -> None:
    """Reject values that `replay ab` does not write.

    Raises:
        ValueError: a value is invalid.
    """
    if recording.version != _VERSION:
        raise ValueError(f"version {recording.version[:20]!r} is unknown")
    parse_confidence(recording.confidence)
    parse_margin(recording.margin)
    looks = recording.looks
    if (
        not looks
        or looks[0] < 1
        or looks[-1] > MAX_PAIRS
        or any(a >= b for a, b in pairwise(looks))
    ):
        raise ValueError("the looks do not increase")
    if len(recording.pairs) > looks[-1]:
        raise ValueError("there are more pairs than looks")
    for name in (n for pair in recording.pairs for n in (pair.baseline, pair.candidate)):
        # A recording from elsewhere must not name files outside its folder.
        if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name[:80]!r} lies outside the folder")


def _recordings(folder: Path) -> list[Path]:
    """Return the recordings in a folder, only the latest ones if there are very many."""
    try:
        found = sorted(path.parent for path in folder.glob(f"*/{AB_FILE}"))
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror or 'cannot be read'}") from error
    if not found:
        raise InputError(f"{folder}: no recordings of `replay ab`; give a folder that has some")
    if len(found) > _MAX_RECORDINGS:
        found = sorted(sorted(found, key=_started_at)[-_MAX_RECORDINGS:])
    return found


def _started_at(folder: Path) -> str:
    """Return the start of the first run of a recording; empty if it cannot be read."""
    try:
        pairs = read_recording(folder).pairs
        return read_summary(folder / pairs[0].baseline).run.started_at if pairs else ""
    except InputError:
        return ""
