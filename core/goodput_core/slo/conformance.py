"""Deviations of a response from its request, and the number of output tokens in spite of them.

Servers differ in how they stream: some send several tokens per event, some report no usage or a
wrong one, some do not produce the requested number of tokens. A verdict must not depend on such
differences, because they say nothing about the latency of the service. If the sources of the token
count contradict each other, the count is therefore an interval, and `judging` uses both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Deviation", "TokenCount", "count_tokens", "describe_deviation"]


class Deviation(StrEnum):
    """A way in which a response does not conform to the API, or to its request."""

    ENDED_EARLY = "ended_early"
    """The model ended the output before the required length, although the request forbids it."""
    CUT_OFF = "cut_off"
    """The server ended the output for its length, before the required length."""
    NO_FINISH_REASON = "no_finish_reason"
    """The output ended without a finish reason, and before the limit in the request or without
    [DONE]."""
    EXCEEDED_LIMIT = "exceeded_limit"
    """The output has more tokens than the limit in the request."""
    WRONG_USAGE = "wrong_usage"
    """The usage contradicts the number of events with output, or the limit in the request."""
    NO_USAGE = "no_usage"
    """The response has no usage, although the request asked for it."""
    UNREADABLE_OUTPUT = "unreadable_output"
    """The server reports output tokens, but no event has output in a field of OpenAI's API."""
    SEVERAL_TOKENS_PER_EVENT = "several_tokens_per_event"
    """The output has more tokens than events, so gaps between tokens are gaps between events."""
    ERROR_IN_STREAM = "error_in_stream"
    """The server reported an error in a response with status 200."""
    UNKNOWN_FINISH_REASON = "unknown_finish_reason"
    """The server ended the output for a reason that can be a failure or not."""
    NOT_STREAMED = "not_streamed"
    """The response is no event stream, although the request asked for one."""
    COMPRESSED = "compressed"
    """The response is compressed, although the request asked for an uncompressed one."""
    CUT_BY_CLIENT = "cut_by_client"
    """The time limit of the client ended the response before it had missed a target. Only judging
    finds it, because it depends on the targets; records do not have it."""

    @property
    def leaves_doubt(self) -> bool:
        """True if a response with this deviation may be judged differently from one without it."""
        return self not in {Deviation.SEVERAL_TOKENS_PER_EVENT, Deviation.ERROR_IN_STREAM}


_TEXTS: Final = {
    Deviation.ENDED_EARLY: "outputs ended before the length of their rows, so the target ignores "
    "ignore_eos; --length-pinning none accepts the lengths that the model chooses",
    Deviation.CUT_OFF: "outputs were cut off before the length of their rows, by the context "
    "length or by a limit of the target",
    Deviation.NO_FINISH_REASON: "outputs ended without a finish reason, and before their limit "
    "or without [DONE], as if the target interrupts responses; llama_cpp.server does so on the "
    "next request, unless it has --interrupt_requests false",
    Deviation.EXCEEDED_LIMIT: "outputs have more tokens than max_tokens, which the target ignores",
    Deviation.WRONG_USAGE: "responses report a usage that contradicts their events or max_tokens",
    Deviation.NO_USAGE: "responses have no usage, although the requests asked for it, so "
    "each event with output was counted as one token",
    Deviation.UNREADABLE_OUTPUT: "responses report output tokens without an event that has text, "
    "so the time of the first token is not known; the text may be in a field that is not of "
    "OpenAI's API",
    Deviation.SEVERAL_TOKENS_PER_EVENT: "responses have several tokens per event, so TBT is the "
    "gap between events",
    Deviation.ERROR_IN_STREAM: "responses with status 200 contain an error",
    Deviation.UNKNOWN_FINISH_REASON: "outputs ended with a finish reason that is unknown, so they "
    "may have failed",
    Deviation.NOT_STREAMED: "responses were not streamed, so the target ignores stream",
    Deviation.COMPRESSED: "responses were compressed without being asked for",
    Deviation.CUT_BY_CLIENT: "responses were ended by the client's time limit although "
    "they had met their SLO targets until then; raise --timeout",
}


def describe_deviation(deviation: Deviation, count: int) -> str:
    """Describe a deviation and the number of its responses, as a clause."""
    return f"{count} {_TEXTS[deviation]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """The number of output tokens of one complete response.

    Args:
        tokens: the number of tokens; the smallest plausible number if it is uncertain.
        most_tokens: the largest plausible number; equal to `tokens` if the number is certain.
        deviations: deviations that concern tokens, in the order of `Deviation`.
    """

    tokens: int
    most_tokens: int
    deviations: tuple[Deviation, ...]


def count_tokens(
    events: int,
    usage: int | None,
    *,
    limit: int | None,
    pinned: bool,
    at_limit: bool,
    finished: bool = True,
) -> TokenCount:
    """Return the number of output tokens of a complete response.

    Three numbers can give the count: the events with output, the usage that the server reports,
    and the limit, if the output must or did reach it. Events and usage are each accepted if they
    equal the limit. Without such a match, the usage is accepted if it is at least the number of
    events and within the limit. Otherwise the count is uncertain, from the smaller to the larger
    of the numbers.

    Args:
        events: number of events with output.
        usage: output tokens reported by the server; None if it reported none.
        limit: maximum number of output tokens in the request; None if there was none.
        pinned: True if the output must have exactly `limit` tokens.
        at_limit: True if the server reports that the output ended at the limit.
        finished: True if the server reports why the output ended.
    """
    expected = limit if pinned or at_limit else None
    reported = usage or None if events else usage
    if reported is None:
        fewest, most = events, max(events, expected or 0) if events else 0
    elif expected is not None and events == expected >= 1:
        fewest = most = expected
    elif events <= reported and (limit is None or reported <= limit or events > limit):
        fewest = most = reported
    else:
        # With fewer than two tokens a response would have no TPOT, and so could not miss it.
        fewest, most = max(min(events, reported), min(events, 2)), max(events, reported)
    deviations: list[Deviation] = []
    if not finished and (limit is None or fewest < limit):
        deviations.append(Deviation.NO_FINISH_REASON)
    elif pinned and limit is not None and most < limit:
        deviations.append(Deviation.CUT_OFF if at_limit else Deviation.ENDED_EARLY)
    if limit is not None and fewest > limit:
        deviations.append(Deviation.EXCEEDED_LIMIT)
    if usage is None:
        deviations.append(Deviation.NO_USAGE)
    elif usage != fewest or fewest != most:
        deviations.append(Deviation.WRONG_USAGE)
    if not events and (usage or at_limit):
        deviations.append(Deviation.UNREADABLE_OUTPUT)
    if 0 < events < fewest:
        deviations.append(Deviation.SEVERAL_TOKENS_PER_EVENT)
    return TokenCount(tokens=fewest, most_tokens=most, deviations=tuple(deviations))
