"""The admin token of one revision's engines: derived, so that it never has to be read back.

The operator may create Secrets and nothing else with them. It finds the token that it wrote
before a restart by deriving it again; whoever has one revision's token learns no other.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LEAST_KEY_BYTES", "control_token", "read_key"]

LEAST_KEY_BYTES: Final = 32
_MOST_KEY_BYTES: Final = 4096
_PURPOSE: Final = b"goodput control token"


def control_token(key: bytes, *, service_uid: str, revision: str) -> str:
    """The token that the engines of one revision accept on their admin port.

    Args:
        key: the operator's own.
        service_uid: of the LLMService: a namesake that comes later gets another token.
        revision: the revision's name.
    """
    # Neither a uid nor a name holds a zero byte: no two pairs make the same message.
    message = b"\0".join((_PURPOSE, service_uid.encode(), revision.encode()))
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def read_key(path: Path) -> bytes:
    """The operator's key, from the Secret that is mounted as a file.

    Raises:
        InputError: the file cannot be read, or is too short to be a key.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_MOST_KEY_BYTES)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; mount the Secret with the operator's key "
            "there, or name the file with --key-file"
        ) from error
    if len(key) < LEAST_KEY_BYTES:
        raise InputError(
            f"{path}: has {len(key)} bytes; a key needs at least {LEAST_KEY_BYTES}, such as "
            f"`head -c {LEAST_KEY_BYTES} /dev/urandom` writes"
        )
    return key
