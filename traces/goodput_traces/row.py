"""One request of a trace, as the rest of Goodput sees it.

Field names equal the columns of the Parquet format, so that a person who knows the file knows
the object. Nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.slo.targets import Targets
from goodput_core.units import ms_to_ns

__all__ = ["TraceRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request: when it arrived, how long it was, and what the trace knows besides.

    Args:
        request_id: unique within the trace; pairs two runs of one trace.
        timestamp_start_unix_ns: arrival, nanoseconds. Since the Unix epoch for an absolute
            clock, since the trace's or the session's start for a relative one.
        input_tokens: tokens of the prompt, at least 1.
        output_tokens: tokens of the answer, at least 1 (zeros are floored and counted).
        max_output_tokens: the bound the client asked for; all that a policy may know.
        prompt: the text itself, where the trace has it.
        total_hashes: one hash per block of the prompt, in order; equal hashes are equal
            prefixes. Empty: no prefix structure is known. Hashes beyond the prompt's blocks
            belong to the answer.
        block_size: tokens per hash; present when `total_hashes` is not empty.
        provided_session_id: the session as the source names it.
        poor_man_session_id: a session derived by the source, when it names none.
        turn: position within the session, from 0.
        parent_request_id: the request whose answer this one follows.
        delay_ms: think time between the parent's answer and this request, milliseconds.
        slo_class: the class of traffic.
        ttft_target_ms: the row's own promise for the first token, milliseconds.
        tpot_target_ms: the row's own promise per output token, milliseconds.
        e2e_target_ms: the row's own promise for the whole request, milliseconds.
        priority: larger is more urgent.
        request_canceled: whether the source's client gave up on it.
        cancel_after_ms: when the client gave up, milliseconds after arrival.
        duration_ttft_ms: recorded time to first token, milliseconds; never drives a replay.
        duration_e2e_ms: recorded duration, milliseconds; never drives a replay.
        model_name: the model that served it.
        org_id: who sent it.
        request_type: what the source calls its kind.
        output_text: the answer, where the trace has it.
    """

    request_id: str
    timestamp_start_unix_ns: int
    input_tokens: int
    output_tokens: int
    max_output_tokens: int | None = None
    prompt: str | None = None
    total_hashes: tuple[int, ...] = ()
    block_size: int | None = None
    provided_session_id: str | None = None
    poor_man_session_id: int | None = None
    turn: int | None = None
    parent_request_id: str | None = None
    delay_ms: float | None = None
    slo_class: str | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    e2e_target_ms: float | None = None
    priority: int | None = None
    request_canceled: bool | None = None
    cancel_after_ms: float | None = None
    duration_ttft_ms: int | None = None
    duration_e2e_ms: int | None = None
    model_name: str | None = None
    org_id: str | None = None
    request_type: str | None = None
    output_text: str | None = None

    @property
    def targets(self) -> Targets:
        """The row's own promises; they win over those of its class."""
        return Targets(
            ttft_ns=None if self.ttft_target_ms is None else ms_to_ns(self.ttft_target_ms),
            tpot_ns=None if self.tpot_target_ms is None else ms_to_ns(self.tpot_target_ms),
            e2e_ns=None if self.e2e_target_ms is None else ms_to_ns(self.e2e_target_ms),
        )

    @property
    def session_id(self) -> str | None:
        """The session this row belongs to, the provided one first; None: it stands alone."""
        if self.provided_session_id is not None:
            return self.provided_session_id
        return None if self.poor_man_session_id is None else str(self.poor_man_session_id)

    @property
    def cancel_after_ns(self) -> int | None:
        """When the client gives up, nanoseconds after arrival; None: never."""
        return None if self.cancel_after_ms is None else ms_to_ns(self.cancel_after_ms)
