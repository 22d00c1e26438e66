"""A short name for a value: objects are told apart by it, and named after it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["digest_of"]


def digest_of(body: Mapping[str, Any], characters: int) -> str:
    """The first hexadecimal characters of a value's SHA-256.

    Revisions bear it in their names: another digest of the same value would replace every pod.
    """
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:characters]
