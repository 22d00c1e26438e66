"""The keys that clients of the OpenAI endpoints must send, from the file of `--api-key-file`.

Only digests of the keys are kept, and no message contains a key.
"""

from __future__ import annotations

import hmac
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.tenants.tenant_list import hash_key
from goodput_engine.openai.errors import APIError
from goodput_engine.reloaded_file import ReloadedFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multidict import MultiMapping

__all__ = ["ApiKeys", "invalid_key", "sent_key"]

_MAX_FILE_BYTES: Final = 64 << 10
_MAX_KEYS: Final = 256
_MAX_KEY: Final = 1024
_KEY: Final = re.compile(rf"[!-~]{{8,{_MAX_KEY}}}")


class ApiKeys:
    """The valid keys.

    Args:
        path: file with one key per line; empty lines and lines that begin with `#` are ignored.
        clock: returns monotonic nanoseconds. At most once per second, the file is checked for
            changes when a request arrives.

    Raises:
        InputError: the file is unreadable or invalid.
    """

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        self._file = ReloadedFile(
            path,
            _parse_keys,
            limit_bytes=_MAX_FILE_BYTES,
            replaced="API keys replaced",
            kept="API keys not replaced",
            remedy="name a file with one API key per line",
            clock=clock,
        )

    def require(self, headers: MultiMapping[str]) -> None:
        """Check the header `Authorization` of a request.

        Raises:
            APIError: 401 if the header has no valid key.
        """
        self._file.refresh()
        given = sent_key(headers)
        digest = hash_key(given)
        # Every key is compared, so that the time does not depend on the position of a match.
        is_valid = 0
        for valid in self._file.content:
            is_valid |= hmac.compare_digest(digest, valid)
        if not given or not is_valid:
            raise invalid_key(given)


def sent_key(headers: MultiMapping[str]) -> str:
    """Return the bearer token of a request, cut off after the longest possible key.

    It is empty if there is none.

    Raises:
        APIError: 401 if there is more than one header, since a proxy in front of the router may
            have checked another one.
    """
    values = headers.getall("Authorization", ())
    if len(values) > 1:
        raise _unauthorized("the request has more than one header Authorization")
    scheme, _, given = (values[0] if values else "").partition(" ")
    return given.strip()[: _MAX_KEY + 1] if scheme.lower() == "bearer" else ""


def invalid_key(given: str) -> APIError:
    """Return the 401 for a key that is not valid; `given` is empty if none was sent."""
    return _unauthorized("the API key is not valid" if given else "no API key was sent")


def _unauthorized(problem: str) -> APIError:
    return APIError(
        HTTPStatus.UNAUTHORIZED,
        f"{problem}; send a key of this service as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        close=True,
    )


def _parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Return the digests of the keys in a file.

    Raises:
        InputError: the file is invalid.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise InputError("larger than 64 KiB; is this a file of API keys?")
    lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
    keys = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
    for number, key in keys:
        if not _KEY.fullmatch(key):
            raise InputError(
                f"line {number}: a key must be 8 to {_MAX_KEY} visible ASCII "
                "characters without spaces; write one key per line"
            )
    if not 0 < len(keys) <= _MAX_KEYS:
        raise InputError(f"{len(keys)} API keys; write 1 to {_MAX_KEYS}, one per line")
    return tuple(hash_key(key) for _, key in keys)
