"""What a request was promised, from its headers: class, targets, priority, and its true length.

The true length of a replayed row comes in beside the promise and is handed on apart from it:
only the executor may see it.
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
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.units import NS_PER_MS
from goodput_engine.server.refusals import bad_request

__all__ = ["HeaderValues", "SLOBook", "read_headers"]

_MAX_MS: Final = 86_400_000
_MAX_PRIORITY: Final = 2**31 - 1
_MAX_OUTPUT_TOKENS: Final = 1_048_576
_DECIMAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderValues:
    """What a request's headers say, validated.

    Args:
        request_id: the client's own name for the request; None: it gave none.
        slo_class: the class it asks for; None: it names none.
        targets: its own targets.
        priority: larger is more urgent.
        output_tokens: the length a replayed row really had, for the executor alone.
    """

    request_id: str | None
    slo_class: str | None
    targets: Targets
    priority: int
    output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOBook:
    """The classes a service promises.

    Args:
        classes: by name.
        default: the class of a request that names none.
    """

    classes: Mapping[str, SLOClass]
    default: str

    def promised(self, asked: HeaderValues, in_body: str | None) -> tuple[str, Targets]:
        """The class of a request and its targets, its own applied.

        Args:
            asked: its headers.
            in_body: the body's `slo_class`.

        Raises:
            Refusal: 400 for a class that nobody promised, or two different ones.
        """
        if asked.slo_class is not None and in_body not in {None, asked.slo_class}:
            raise bad_request(
                f"slo_class is {_shown(in_body)} but {HEADER_SLO_CLASS} is "
                f"{_shown(asked.slo_class)}; send one of them",
                "slo_class",
            )
        name = asked.slo_class if asked.slo_class is not None else in_body
        found = self.classes.get(self.default if name is None else name)
        if found is None:
            param = HEADER_SLO_CLASS if asked.slo_class is not None else "slo_class"
            known = ", ".join(self.classes)
            raise bad_request(
                f"{param}: {_shown(name)} is not an SLO class of this service; classes are {known}",
                param,
            )
        return found.name, found.targets.overridden_by(asked.targets)


def read_headers(headers: Mapping[str, str]) -> HeaderValues:
    """The headers that steer a request.

    Raises:
        Refusal: 400 for a value that is not what its header holds.
    """
    request_id = headers.get(HEADER_REQUEST_ID)
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise bad_request(
            f"{HEADER_REQUEST_ID} must be 1 to 128 visible ASCII characters", HEADER_REQUEST_ID
        )
    return HeaderValues(
        request_id=request_id,
        slo_class=headers.get(HEADER_SLO_CLASS),
        targets=Targets(
            ttft_ns=_milliseconds(headers, HEADER_SLO_TTFT_MS),
            tpot_ns=_milliseconds(headers, HEADER_SLO_TPOT_MS),
            e2e_ns=_milliseconds(headers, HEADER_SLO_E2E_MS),
        ),
        priority=_integer(headers, HEADER_PRIORITY, -_MAX_PRIORITY, _MAX_PRIORITY) or 0,
        output_tokens=_integer(headers, HEADER_OUTPUT_TOKENS, 1, _MAX_OUTPUT_TOKENS),
    )


def _milliseconds(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    ns = round(float(text) * NS_PER_MS) if _DECIMAL.fullmatch(text) else 0
    if not 0 < ns <= _MAX_MS * NS_PER_MS:
        raise bad_request(
            f"{name} must be a number of milliseconds above 0, at most {_MAX_MS}, "
            f"not {_shown(text)}",
            name,
        )
    return ns


def _integer(headers: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise bad_request(
            f"{name} must be a whole number in {low} to {high}, not {_shown(text)}", name
        )
    return int(text)


def _shown(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 60 else f"{text[:60]}…")
