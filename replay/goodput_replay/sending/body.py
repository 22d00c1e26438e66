"""From a planned request to the bytes and headers that go over the wire.

Rendering happens ahead of the send, off the hot path. How the true length of an answer is
pinned is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from goodput_core.contract import PATH_CHAT_COMPLETIONS, PATH_COMPLETIONS
from goodput_engine.openai.bodies import request_body
from goodput_engine.openai.headers import write_headers
from goodput_replay.plan import PlannedRequest
from goodput_replay.run.facts import LengthPinning

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_replay.sending.prompts import Prompts

__all__ = ["Endpoint", "PreparedRequest", "RequestRenderer"]


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
        body = request_body(
            self._options(planned),
            self._prompts.render(planned.prompt),
            chat=self._endpoint is Endpoint.CHAT,
        )
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
        return write_headers(
            request_id=planned.request_id,
            slo_class=planned.slo_class,
            targets=planned.targets,
            priority=planned.priority,
            output_tokens=planned.output_tokens if self._pinning is LengthPinning.HEADER else None,
        )
