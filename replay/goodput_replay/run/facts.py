"""What the sender knows of a run and the records do not say: inputs, the window, the client.

Values only. The sender fills them in, the summary and the report print them; nothing here reads
a clock, an environment or a file. Secrets never enter: headers come by name alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.targets import SLOClass

__all__ = [
    "ClientFacts",
    "EmulationFacts",
    "LengthPinning",
    "Promise",
    "RunFacts",
    "TargetFacts",
    "TraceFacts",
]


class LengthPinning(StrEnum):
    """How the true output length of a row reached the server."""

    HEADER = "header"
    """In a header that only our engine's executor reads: no policy learned it."""
    MAX_TOKENS = "max_tokens"
    """As `max_tokens` with `ignore_eos`: lengths were disclosed to the server's scheduler."""
    NONE = "none"
    """Not at all: answers end where the model ends them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What requests were held to.

    Args:
        classes: the promises, in the manifest's order; empty: only a row's own targets judge.
        default: the class of a request that names none; None without classes.
        outage_s: the longest outage that a PASS must exclude; 0 if none is declared.
    """

    classes: tuple[SLOClass, ...] = ()
    default: str | None = None
    outage_s: int = 0

    def by_name(self) -> dict[str, SLOClass]:
        """The promises by class name, in order."""
        return {c.name: c for c in self.classes}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """The trace that was replayed.

    Args:
        name: the file's name, or `sample`; never a path with a person's name in it.
        digest: `sha256:` and the hexadecimal digest of the file's bytes.
        source: where the trace comes from, as its metadata says; empty when it does not.
        licence: its licence, as its metadata says; empty when it does not.
        clock: what its timestamps count from: `absolute`, `trace-relative`, `session-relative`.
        synthetic: whether a generator made it; said wherever the run is shown.
        transforms: what was done to it, in order, as a person would type it: `--window 10m..20m`.
    """

    name: str
    digest: str
    source: str = ""
    licence: str = ""
    clock: str = ""
    synthetic: bool = False
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Where the requests went.

    Args:
        url: the base URL, without credentials.
        endpoint: the path: `/v1/completions`.
        model: the model's name as sent.
        service: the manifest's `metadata.name`; empty for a bare `--target`.
        pinning: how output lengths were pinned.
        header_names: names of the extra headers that were sent; their values never leave memory.
        streaming: whether answers were streamed.
    """

    url: str
    endpoint: str
    model: str
    service: str = ""
    pinning: LengthPinning = LengthPinning.NONE
    header_names: tuple[str, ...] = ()
    streaming: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """What the client itself cost and suffered, from the first scheduled row to the last answer.

    Args:
        cpu_ns: processor time of the client process.
        loop_lag_p99_ns: p99 of how late the event loop woke a periodic timer.
        loop_lag_max_ns: the latest such wake-up.
        peak_in_flight: most requests in flight at once.
        cpus: processors that the client could use.
    """

    cpu_ns: int = 0
    loop_lag_p99_ns: int = 0
    loop_lag_max_ns: int = 0
    peak_in_flight: int = 0
    cpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationFacts:
    """That a run was in virtual time, on what, and what it amounted to there.

    Args:
        device: the device profile's name.
        device_note: its own sentence, which says where its numbers are from.
        illustrative: whether the profile stands for no device.
        replicas: at the run's zero, all of them ready.
        topology: how they share the work, as words; empty: each does all of it.
        policy, preemption, placement: how requests were scheduled and placed.
        oracle: true lengths ordered the requests in the policy's place.
        token_budget: tokens that one step might compute, at the run's zero.
        max_num_seqs: requests that might run at once on a replica.
        end_ns: when the last request ended.
        device_ns: time for which devices were held: replicas, each for as long as it existed,
            times the devices of one.
        peak_replicas: most of them at once, starting and draining ones too; 0: not known, since
            the run was interrupted.
        final_replicas: those at the end that were not draining.
        steps: of all replicas.
        preemptions: requests sent back to wait.
        recomputed_tokens, swapped_tokens: of these: computed again, or copied to host memory.
        migrations: requests that went on on another replica while they decoded.
        migrations_aborted: such moves that were given up.
        migrated_blocks: KV blocks copied for both.
    """

    device: str
    device_note: str
    illustrative: bool
    replicas: int
    topology: str
    policy: str
    oracle: bool
    preemption: str
    placement: str
    token_budget: int
    max_num_seqs: int
    end_ns: int = 0
    device_ns: int = 0
    peak_replicas: int = 0
    final_replicas: int = 0
    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    migrations: int = 0
    migrations_aborted: int = 0
    migrated_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run, apart from its records.

    Args:
        trace: what was replayed.
        target: where it went.
        promise: what it was held to.
        client: what the client cost and suffered.
        window_start_ns: first instant of the judged window, nanoseconds since the run's zero
            (the zero of every record's times).
        window_ns: the window's length; goodput is good requests over this.
        rows_planned: rows of the window, warm-up rows left out. Rows for which no record was
            appended count as unsent.
        warmup_rows: rows that were sent before the window and are not judged.
        seed: seed of prompts and sampling.
        confidence: one-sided, of each bound of an attainment.
        salt: what made this run's prompts differ from another run's, so that no cache helps.
        started_at: wall clock of the run's zero, ISO 8601 in UTC; in virtual time the trace's
            own time at that instant, so that equal runs have equal bytes.
        version: Goodput's version.
        command: the command line, argument by argument, with secrets replaced.
        complete: False when the run was interrupted or aborted.
        abort_reason: why it is incomplete, as the end of a sentence: `interrupted after 120 s of
            300 s`; empty when complete.
        emulation: what was emulated; None: the run was in real time.
    """

    trace: TraceFacts
    target: TargetFacts
    window_start_ns: int
    window_ns: int
    rows_planned: int
    started_at: str
    version: str
    promise: Promise
    client: ClientFacts = ClientFacts()
    warmup_rows: int = 0
    seed: int = 0
    confidence: float = DEFAULT_CONFIDENCE
    salt: str = ""
    command: tuple[str, ...] = ()
    complete: bool = True
    abort_reason: str = ""
    emulation: EmulationFacts | None = None
