"""`goodput up --gate`: replay a trace on two manifests, and select the one to serve.

`replay ab` runs the pairs and judges them, as a subprocess. This module makes its command line from
`spec.rollout.gate` of the new manifest, and turns its exit code into a decision.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode, InputError, SpecError
from goodput_core.slo.targets import format_objective
from goodput_core.spec.choices import Baseline, OnInconclusive
from goodput_core.spec.requests import request_options

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService
    from goodput_core.spec.rollout import GateSpec
    from goodput_operator.local.options import UpOptions

__all__ = ["gate_command", "is_promoted", "run_gate"]

_VERDICTS: Final = (ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE, ExitCode.INVALID)
_FILE: Final = "file://"
_SAMPLE: Final = "sample"
"""The trace that is installed with the package."""


def gate_command(options: UpOptions, service: LLMService, baseline: Path) -> tuple[str, ...]:
    """Return the arguments of `replay ab` for the gate of a manifest.

    Args:
        options: options of `goodput up`, with the manifest of the candidate.
        service: the candidate.
        baseline: manifest of the baseline.

    Raises:
        SpecError: the manifest has no gate, or its trace, history or tokenizer is not on this
            machine.
    """
    gate = service.spec.rollout.gate
    if gate is None:
        raise SpecError(
            "spec.rollout.gate", "is required for --gate; name a trace with trace: file://PATH"
        ).at(str(options.manifest))
    if gate.trace != _SAMPLE and not gate.trace.startswith(_FILE):
        raise SpecError(
            "spec.rollout.gate.trace",
            f"{gate.trace} is not on this machine; for goodput up, write file://PATH or sample",
        ).at(str(options.manifest))
    command = ["--trace", _path(gate.trace)]
    for field, place in {"history": gate.history, "tokenizer": gate.tokenizer}.items():
        if place is not None and not place.startswith(_FILE):
            raise SpecError(
                f"spec.rollout.gate.{field}",
                f"{place} is not on this machine; for goodput up, write file://PATH",
            ).at(str(options.manifest))
    if gate.baseline is Baseline.RECORDED:
        assert gate.history is not None, "a rule of the gate"
        command += ["--recorded", _path(gate.history)]
    else:
        command += ["-f", str(baseline)]
        command += [] if gate.history is None else ["--history", _path(gate.history)]
    command += ["-f", str(options.manifest), "--pairs", str(gate.pairs)]
    if gate.max_pairs is not None:
        command += ["--max-pairs", str(gate.max_pairs)]
    if gate.window is not None:
        command += ["--window", f"{gate.window.start_seconds}s..{gate.window.end_seconds}s"]
    if gate.margin is not None:
        command += ["--margin", format_objective(gate.margin)]
    command += request_options(gate, _path)
    if options.device is not None:
        command += ["--device", options.device]
    if options.model_path is not None:
        command += ["--model-path", options.model_path]
    return tuple(command)


def _path(place: str) -> str:
    return str(Path(place.removeprefix(_FILE)).expanduser())


def is_promoted(exit_code: int, gate: GateSpec) -> bool:
    """True if the candidate may serve after this verdict."""
    if exit_code == ExitCode.INCONCLUSIVE:
        return gate.on_inconclusive is OnInconclusive.PROMOTE
    return exit_code == ExitCode.PASS


def run_gate(options: UpOptions, service: LLMService, baseline: Path) -> tuple[Path, str]:
    """Run the gate, and return the manifest to serve and a sentence about the decision.

    Args:
        options: options of `goodput up`, with the manifest of the candidate.
        service: the candidate.
        baseline: manifest of the baseline.

    Raises:
        SpecError: see `gate_command`.
        InputError: there is no verdict.
    """
    arguments = gate_command(options, service, baseline)
    gate = service.spec.rollout.gate
    assert gate is not None
    # With --json, stdout has only the events of the service.
    ended = subprocess.run(
        [sys.executable, "-m", "goodput_core", "replay", "ab", *arguments],
        stdout=sys.stderr if options.json else None,
        check=False,
    )
    if ended.returncode not in _VERDICTS:
        raise InputError(
            f"{options.manifest}: the gate ended without a verdict (exit code "
            f"{ended.returncode}); see the error above"
        )
    name = ExitCode(ended.returncode).name
    if is_promoted(ended.returncode, gate):
        return options.manifest, f"{name}: {options.manifest} is promoted, and replaces {baseline}"
    return baseline, f"{name}: {options.manifest} is refused, and {baseline} is served"
