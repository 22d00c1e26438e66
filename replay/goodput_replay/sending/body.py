"""From a planned request to the bytes and headers that go over the wire.

Rendering happens ahead of the send, off the hot path. How the true length of an answer is
pinned is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.contract import (
    HEADER_OUTPUT_TOKENS,
    HEADER_PRIORITY,
    HEADER_REQUEST_ID,
    HEADER_SLO_CLASS,
    HEADER_SLO_E2E_MS,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
    PATH_CHAT_COMPLETIONS,
    PATH_COMPLETIONS,
)
from goodput_core.units import NS_PER_MS
from goodput_replay.plan import PlannedRequest
from goodput_replay.run.facts import LengthPinning

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_replay.sending.prompts import Prompts

__all__ = ["Endpoint", "PreparedRequest", "RequestRenderer"]

_MAX_ID: Final = 128


class Endpoint(StrEnum):
    """Which of OpenAI's two endpoints is called."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """The HTTP path."""
        return PATH_COMPLETIONS if self is Endpoint.COMPLETIONS else PATH_CHAT_COMPLETIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that only waits for its instant.

    Args:
        planned: what it was made from.
        body: JSON.
        input_tokens: of the prompt as rendered.
        headers: its own, beside those of every request.
    """

    planned: PlannedRequest
    body: bytes
    input_tokens: int
    headers: Mapping[str, str]


class RequestRenderer:
    """Renders requests for one target.

    Args:
        endpoint: where they go.
        prompts: renders prompts.
        pinning: how the answer's length is pinned.
        model_for: the name to send for a name in the trace.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        prompts: Prompts,
        pinning: LengthPinning,
        model_for: Callable[[str], str],
    ) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._pinning = pinning
        self._model_for = model_for

    def render(self, planned: PlannedRequest) -> PreparedRequest:
        """The body and the headers of one request."""
        options = msgspec.json.encode(self._options(planned))[:-1]
        prompt = self._prompts.render(planned.prompt)
        if self._endpoint is Endpoint.COMPLETIONS:
            body = b'%s,"prompt":%s}' % (options, prompt)
        else:
            body = b'%s,"messages":[{"role":"user","content":%s}]}' % (options, prompt)
        return PreparedRequest(
            planned=planned,
            body=body,
            input_tokens=self._prompts.tokens(planned.prompt),
            headers=self._headers(planned),
        )

    def _options(self, planned: PlannedRequest) -> dict[str, object]:
        options: dict[str, object] = {
            "model": self._model_for(planned.model_name),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._pinning is LengthPinning.MAX_TOKENS:
            options["max_tokens"] = planned.output_tokens
            options["min_tokens"] = planned.output_tokens
            options["ignore_eos"] = True
        elif planned.max_output_tokens is not None:
            options["max_tokens"] = planned.max_output_tokens
        return options

    def _headers(self, planned: PlannedRequest) -> dict[str, str]:
        headers = {HEADER_REQUEST_ID: _header_safe(planned.request_id)}
        if planned.slo_class:
            headers[HEADER_SLO_CLASS] = _header_safe(planned.slo_class)
        targets = planned.targets
        for name, bound_ns in (
            (HEADER_SLO_TTFT_MS, targets.ttft_ns),
            (HEADER_SLO_TPOT_MS, targets.tpot_ns),
            (HEADER_SLO_E2E_MS, targets.e2e_ns),
        ):
            if bound_ns is not None:
                headers[name] = f"{bound_ns / NS_PER_MS:.6g}"
        if planned.priority is not None:
            headers[HEADER_PRIORITY] = str(planned.priority)
        if self._pinning is LengthPinning.HEADER:
            headers[HEADER_OUTPUT_TOKENS] = str(planned.output_tokens)
        return headers


def _header_safe(text: str) -> str:
    """Text as a header may carry it: printable ASCII, bounded."""
    if text.isascii() and text.isprintable() and len(text) <= _MAX_ID:
        return text
    return "".join(c if c.isascii() and c.isprintable() else "_" for c in text)[:_MAX_ID]
