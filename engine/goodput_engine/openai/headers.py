"""Headers of a completion request: SLO class, targets, priority, and a replayed output length.

Server and router read these headers, and the replayer writes them. The true output length of a
replayed request is a separate field, because only the executor may see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from goodput_core.contract import (
    HEADER_OUTPUT_TOKENS,
    HEADER_PRIORITY,
    HEADER_REQUEST_ID,
    HEADER_SLO_CLASS,
    HEADER_SLO_E2E_MS,
    HEADER_SLO_TPOT_MS,
    HEADER_SLO_TTFT_MS,
)
from goodput_core.slo.targets import MAX_PRIORITY, SLOClass, Targets
from goodput_core.units import NS_PER_MS
from goodput_engine.openai.errors import bad_request

__all__ = [
    "RequestHeaders",
    "RequestSLO",
    "ServiceClasses",
    "read_headers",
    "read_priority",
    "read_targets",
    "write_headers",
]

_MAX_REQUEST_ID: Final = 128
_MAX_MS: Final = 86_400_000
_MAX_OUTPUT_TOKENS: Final = 1_048_576
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaders:
    """The validated headers of a request.

    Args:
        request_id: the client's identifier; None if it sent none.
        slo_class: the requested class; None if the headers name none.
        targets: the request's own targets.
        priority: the request's priority; larger is more urgent, None if the headers set none.
        output_tokens: the true output length of a replayed request, for the executor only; None
            if the request is not replayed.
    """

    request_id: str | None
    slo_class: str | None
    targets: Targets
    priority: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSLO:
    """The class of a request and the targets against which it is judged.

    Args:
        slo_class: the class's name.
        targets: the class's targets, overridden by the request's own.
        priority: the request's own priority, else that of the class.
        weight: the class's weight.
    """

    slo_class: str
    targets: Targets
    priority: int = 0
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClasses:
    """The SLO classes of a service.

    Args:
        classes: classes by name.
        default: name of the class of requests that name none.
    """

    classes: Mapping[str, SLOClass]
    default: str

    def resolve(
        self,
        targets: Targets,
        *,
        header: str | None,
        body: str | None,
        priority: int | None = None,
    ) -> RequestSLO:
        """Return the class of a request, its targets and its importance.

        Args:
            targets: the request's own targets.
            header: the class in the request's headers; None if they name no class.
            body: the body's `slo_class`; None if it is absent.
            priority: the request's own priority; None for that of the class.

        Raises:
            APIError: 400 for an unknown class, or if header and body name different classes.
        """
        if header is not None and body not in {None, header}:
            raise bad_request(
                f"slo_class is {_quote(body)} but {HEADER_SLO_CLASS} is {_quote(header)}; "
                "send one of them",
                "slo_class",
            )
        name = body if header is None else header
        slo_class = self.classes.get(self.default if name is None else name)
        if slo_class is None:
            param = "slo_class" if header is None else HEADER_SLO_CLASS
            names = ", ".join(self.classes)
            raise bad_request(
                f"{param}: {_quote(name)} is not an SLO class of this service; classes are {names}",
                param,
                "unknown_slo_class",
            )
        return RequestSLO(
            slo_class=slo_class.name,
            targets=slo_class.targets.overridden_by(targets),
            priority=slo_class.priority if priority is None else priority,
            weight=slo_class.weight,
        )


def read_headers(headers: Mapping[str, str]) -> RequestHeaders:
    """Read the headers of a request.

    Args:
        headers: values by name; the mapping decides whether names are case-sensitive.

    Raises:
        APIError: 400 for an invalid value; the error names the header.
    """
    request_id = headers.get(HEADER_REQUEST_ID)
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise bad_request(
            f"{HEADER_REQUEST_ID} must be 1 to {_MAX_REQUEST_ID} visible ASCII characters",
            HEADER_REQUEST_ID,
        )
    return RequestHeaders(
        request_id=request_id,
        slo_class=headers.get(HEADER_SLO_CLASS),
        targets=read_targets(headers),
        priority=read_priority(headers),
        output_tokens=_read_integer(headers, HEADER_OUTPUT_TOKENS, 1, _MAX_OUTPUT_TOKENS),
    )


def read_targets(headers: Mapping[str, str]) -> Targets:
    """Read a request's own targets.

    Raises:
        APIError: 400 for an invalid value; the error names the header.
    """
    return Targets(
        ttft_ns=_read_milliseconds(headers, HEADER_SLO_TTFT_MS),
        tpot_ns=_read_milliseconds(headers, HEADER_SLO_TPOT_MS),
        e2e_ns=_read_milliseconds(headers, HEADER_SLO_E2E_MS),
    )


def read_priority(headers: Mapping[str, str]) -> int | None:
    """Read a request's own priority; None if the headers set none.

    Raises:
        APIError: 400 for an invalid value.
    """
    return _read_integer(headers, HEADER_PRIORITY, -MAX_PRIORITY - 1, MAX_PRIORITY)


def write_headers(
    *,
    request_id: str,
    slo_class: str,
    targets: Targets,
    priority: int | None,
    output_tokens: int | None,
) -> dict[str, str]:
    """Return the headers of a request; long texts are truncated.

    Args:
        request_id: the request's identifier.
        slo_class: the request's class; empty for the service's default.
        targets: the request's own targets.
        priority: the request's priority, larger is more urgent; None for the service's default.
        output_tokens: the output length to reproduce; None to leave it open.
    """
    headers = {HEADER_REQUEST_ID: _make_printable(request_id)}
    if slo_class:
        headers[HEADER_SLO_CLASS] = _make_printable(slo_class)
    for name, target_ns in (
        (HEADER_SLO_TTFT_MS, targets.ttft_ns),
        (HEADER_SLO_TPOT_MS, targets.tpot_ns),
        (HEADER_SLO_E2E_MS, targets.e2e_ns),
    ):
        if target_ns is not None:
            headers[name] = f"{target_ns / NS_PER_MS:.6f}".rstrip("0").rstrip(".")
    if priority is not None:
        headers[HEADER_PRIORITY] = str(priority)
    if output_tokens is not None:
        headers[HEADER_OUTPUT_TOKENS] = str(output_tokens)
    return headers


def _make_printable(text: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= _MAX_REQUEST_ID:
        return text
    characters = (c if c.isascii() and c.isprintable() else "_" for c in text)
    return "".join(characters)[:_MAX_REQUEST_ID]


def _read_milliseconds(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    ns = round(float(text) * NS_PER_MS) if _DECIMAL.fullmatch(text) else 0
    if not 0 < ns <= _MAX_MS * NS_PER_MS:
        raise bad_request(
            f"{name} must be a number of milliseconds above 0, at most {_MAX_MS}, "
            f"not {_quote(text)}",
            name,
            "invalid_slo_target",
        )
    return ns


def _read_integer(headers: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise bad_request(
            f"{name} must be a whole number in {low} to {high}, not {_quote(text)}", name
        )
    return int(text)


def _quote(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 60 else f"{text[:60]}…")
