"""The keys that clients of the OpenAI endpoints must send, from the file of `--api-key-file`.

The file is read again after each change, so that keys can be replaced without a restart. If the new
content is invalid or missing, the last valid keys remain in use. Only digests of the keys are kept,
and no message contains a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_S
from goodput_engine.openai.errors import APIError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multidict import MultiMapping

__all__ = ["ApiKeys"]

_MAX_FILE_BYTES: Final = 64 << 10
_MAX_KEYS: Final = 256
_MAX_KEY: Final = 1024
_KEY: Final = re.compile(rf"[!-~]{{8,{_MAX_KEY}}}")
_CHECK_NS: Final = NS_PER_S
_log: Final = logging.getLogger(__name__)


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
        self._path = path
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._problem = ""
        self._digests = self._read()
        self._checked_ns = clock()

    def require(self, headers: MultiMapping[str]) -> None:
        """Check the header `Authorization` of a request.

        Raises:
            APIError: 401 if the header has no valid key.
        """
        self._refresh()
        values = headers.getall("Authorization", ())
        scheme, _, given = (values[0] if len(values) == 1 else "").partition(" ")
        given = given.strip()
        digest = hashlib.sha256(given[: _MAX_KEY + 1].encode(errors="surrogateescape")).digest()
        # Every key is compared, so that the time does not depend on the position of a match.
        is_valid = 0
        for valid in self._digests:
            is_valid |= hmac.compare_digest(digest, valid)
        if scheme.lower() == "bearer" and is_valid:
            return
        problem = "the API key is not valid" if given else "no API key was sent"
        raise APIError(
            HTTPStatus.UNAUTHORIZED,
            f"{problem}; send a key of this service as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            close=True,
        )

    def _refresh(self) -> None:
        """Read the file again if it changed."""
        now_ns = self._clock()
        if now_ns - self._checked_ns < _CHECK_NS:
            return
        self._checked_ns = now_ns
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_ino, stat.st_size) == self._stamp:
                return
            self._digests = self._read()
            problem = ""
            _log.info("API keys replaced", extra={"keys": len(self._digests)})
        except (InputError, OSError) as error:
            problem = str(error)
            if problem != self._problem:
                _log.warning("API keys not replaced", extra={"detail": problem})
        self._problem = problem

    def _read(self) -> tuple[bytes, ...]:
        """Return the digests of the keys in the file.

        Raises:
            InputError: the file is unreadable or invalid.
        """
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            stat = self._path.stat()
        except OSError as error:
            raise InputError(
                f"{self._path}: {error.strerror}; name a file with one API key per line"
            ) from error
        if len(data) > _MAX_FILE_BYTES:
            raise InputError(f"{self._path}: larger than 64 KiB; is this a file of API keys?")
        lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
        keys = [(n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")]
        for number, key in keys:
            if not _KEY.fullmatch(key):
                raise InputError(
                    f"{self._path}: line {number}: a key must be 8 to {_MAX_KEY} visible ASCII "
                    "characters without spaces; write one key per line"
                )
        if not 0 < len(keys) <= _MAX_KEYS:
            raise InputError(
                f"{self._path}: {len(keys)} API keys; write 1 to {_MAX_KEYS}, one per line"
            )
        self._stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        return tuple(hashlib.sha256(key.encode()).digest() for _, key in keys)
