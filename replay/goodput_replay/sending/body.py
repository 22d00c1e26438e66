"""Render a planned request into the bytes and headers to send.

Requests are rendered before their scheduled time, off the hot path. Pinned output lengths are
encoded only here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import NAMESPACE_OID, uuid5

from goodput_core.spec.choices import Endpoint
from goodput_engine.openai.bodies import request_body
from goodput_engine.openai.headers import write_headers
from goodput_replay.plan import PlannedRequest
from goodput_replay.runs.summary import LengthPinning
from goodput_replay.sending.prompts import PromptRenderer

__all__ = ["PreparedRequest", "RequestRenderer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is ready to be sent.

    Args:
        planned: the request in the plan.
        body: JSON request body.
        input_tokens: tokens of the rendered prompt.
        headers: headers of this request, in addition to the common ones.
    """

    planned: PlannedRequest
    body: bytes
    input_tokens: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRenderer:
    """Renders requests for one target.

    Args:
        endpoint: the API to call.
        prompts: renders prompts.
        pinning: how the output length is pinned.
        model_for: maps a model name of the trace to the served name.
        unnamed_class: SLO class whose name the target does not know; None if there is none.
        uuids: True to send a UUID made from each request id, for targets that reject other ids.
    """

    endpoint: Endpoint
    prompts: PromptRenderer
    pinning: LengthPinning
    model_for: Callable[[str], str]
    unnamed_class: str | None = None
    uuids: bool = False

    def render(self, planned: PlannedRequest) -> PreparedRequest:
        """Render the body and the headers of one request."""
        body = request_body(
            self._body_options(planned),
            self.prompts.render(planned.prompt),
            chat=self.endpoint is Endpoint.CHAT,
        )
        return PreparedRequest(
            planned=planned,
            body=body,
            input_tokens=self.prompts.tokens(planned.prompt),
            headers=self._headers(planned),
        )

    def _body_options(self, planned: PlannedRequest) -> dict[str, object]:
        options: dict[str, object] = {
            "model": self.model_for(planned.model_name),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.pinning in {LengthPinning.MAX_TOKENS, LengthPinning.LIMIT}:
            options["max_tokens"] = planned.output_tokens
            if self.pinning is LengthPinning.MAX_TOKENS:
                options["min_tokens"] = planned.output_tokens
                options["ignore_eos"] = True
        elif planned.max_output_tokens is not None:
            options["max_tokens"] = planned.max_output_tokens
        return options

    def _headers(self, planned: PlannedRequest) -> dict[str, str]:
        name = planned.request_id
        return write_headers(
            request_id=str(uuid5(NAMESPACE_OID, name)) if self.uuids else name,
            slo_class="" if planned.slo_class == self.unnamed_class else planned.slo_class,
            targets=planned.targets,
            priority=planned.priority,
            output_tokens=planned.output_tokens if self.pinning is LengthPinning.HEADER else None,
        )
