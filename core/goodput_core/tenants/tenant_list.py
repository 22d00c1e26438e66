"""The file of tenants: one line per tenant, with its weight and the hashes of its keys.

    acme weight=3 sha256:9f86d081…

A key is a random text of 256 bits, so one SHA-256 suffices: guessing is hopeless without salt and
slow hashing, which protect passwords, and a single look-up finds the tenant of a key.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_KEYS",
    "MAX_TENANTS",
    "OTHER_TENANTS",
    "Tenant",
    "format_tenants",
    "hash_key",
    "parse_tenants",
]

MAX_FILE_BYTES: Final = 1 << 20
"""The limit of a Secret."""
MAX_TENANTS: Final = 1_000
MAX_KEYS: Final = 4
"""Maximum keys of a tenant; two are needed while a key is replaced."""
OTHER_TENANTS: Final = "other"
"""Reserved name: in metrics, the tenants that have no series of their own."""
_MAX_WEIGHT: Final = 1_000
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_WEIGHT: Final = re.compile(r"weight=([1-9][0-9]{0,3})")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_FORM: Final = "NAME weight=N sha256:HASH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant.

    Args:
        name: its name, a label of metrics.
        weight: its weight in the division of overloaded replicas.
        hashes: SHA-256 of each of its keys.
    """

    name: str
    weight: int
    hashes: tuple[bytes, ...]


def hash_key(key: str) -> bytes:
    """Return the hash of a key by which a file names it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_tenants(data: bytes) -> tuple[Tenant, ...]:
    """Return the tenants of a file, in its order.

    Raises:
        InputError: the file is too large or has no tenant, or a line is invalid. The message names
            the line, but nothing of its content, which may be a key.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InputError("larger than 1 MiB; is this a file of tenants?")
    tenants: dict[str, Tenant] = {}
    owners: dict[bytes, int] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            tenant = _parse_line(text)
        except ValueError as error:
            raise InputError(f"line {number}: {error}; write {_FORM}") from None
        if tenant.name in tenants:
            raise InputError(
                f"line {number}: its tenant has a line already; write all hashes of a tenant on "
                "one line"
            )
        for digest in tenant.hashes:
            if digest in owners:
                raise InputError(
                    f"line {number}: the same hash is on line {owners[digest]}; give every tenant "
                    "keys of its own"
                )
            owners[digest] = number
        tenants[tenant.name] = tenant
        if len(tenants) > MAX_TENANTS:
            raise InputError(
                f"line {number}: more than {MAX_TENANTS:,} tenants; remove some, or divide them "
                "among several services"
            )
    if not tenants:
        raise InputError(f"no tenants; write at least one line {_FORM}")
    return tuple(tenants.values())


def format_tenants(tenants: Sequence[Tenant], previous: str = "") -> str:
    """Return the content of a file of tenants.

    Args:
        tenants: the tenants.
        previous: the valid content that is replaced, whose comments and order are kept.
    """
    remaining = {tenant.name: tenant for tenant in tenants}
    lines: list[str] = []
    for line in previous.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            lines.append(line)
            continue
        before = _parse_line(text)
        if (tenant := remaining.pop(before.name, None)) is not None:
            lines.append(line if tenant == before else _format_line(tenant))
    lines += map(_format_line, remaining.values())
    return "".join(f"{line}\n" for line in lines)


def _format_line(tenant: Tenant) -> str:
    hashes = " ".join(f"sha256:{digest.hex()}" for digest in tenant.hashes)
    return f"{tenant.name} weight={tenant.weight} {hashes}"


def _parse_line(text: str) -> Tenant:
    """Return the tenant of one line.

    Raises:
        ValueError: the problem.
    """
    name, *fields = text.split()
    if not _NAME.fullmatch(name) or name == OTHER_TENANTS:
        raise ValueError(
            "the name must have 1 to 40 lower-case letters, digits and inner hyphens, and differ "
            f"from {OTHER_TENANTS!r}"
        )
    weights = [match[1] for field in fields if (match := _WEIGHT.fullmatch(field))]
    hashes = [bytes.fromhex(match[1]) for field in fields if (match := _HASH.fullmatch(field))]
    if len(weights) + len(hashes) < len(fields):
        raise ValueError("a field is neither weight= with 1 to 1000 nor sha256: with 64 digits")
    if len(weights) > 1 or int(weights[0] if weights else 1) > _MAX_WEIGHT:
        raise ValueError("a tenant has one weight from 1 to 1000")
    if not 0 < len(hashes) <= MAX_KEYS:
        raise ValueError(f"a tenant has 1 to {MAX_KEYS} hashes of keys")
    return Tenant(name=name, weight=int(weights[0]) if weights else 1, hashes=tuple(hashes))
