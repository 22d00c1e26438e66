"""`goodput tenants`: make keys of tenants, and check the file that a router reads.

A key is printed once and never stored: the file has its hash.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode, InputError
from goodput_core.files import write_output
from goodput_core.tenants.tenant_list import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    Tenant,
    format_tenants,
    hash_key,
    parse_tenants,
)

if TYPE_CHECKING:
    import argparse

__all__ = ["main", "make_parser"]

_KEY_BYTES = 32
_ESCAPE = "surrogateescape"
"""Keeps bytes of comments that are not UTF-8."""


def make_parser() -> CommandParser:
    """Build the parser of `goodput tenants`."""
    parser = CommandParser(
        "goodput tenants",
        summary="Manage the tenants of a router: their keys, of which only hashes are stored, and "
        "their weights.",
        examples=(
            "goodput tenants add acme --weight 3 --file tenants.txt",
            "goodput tenants add acme --file tenants.txt   # one more key, to replace the first",
            "goodput tenants remove-key acme --file tenants.txt",
            "goodput tenants list --file tenants.txt",
        ),
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog=parser.prog
    )
    add = actions.add_parser(
        "add",
        help="add a tenant, or one more key, and print the key",
        summary="Add a tenant, or one more key of a tenant, and print the key.",
        examples=("goodput tenants add acme --weight 3 --file tenants.txt",),
    )
    add.add_argument("name", metavar="NAME", help="name of the tenant, a label of metrics")
    add.add_argument(
        "--weight",
        type=argument_type(_parse_weight, "weight"),
        metavar="N",
        help="weight in the division of overloaded replicas (default: unchanged, or 1)",
    )
    remove_key = actions.add_parser(
        "remove-key",
        help="remove the oldest key of a tenant",
        summary="Remove the oldest key of a tenant, which must have another one.",
        examples=("goodput tenants remove-key acme --file tenants.txt",),
    )
    remove_key.add_argument("name", metavar="NAME", help="name of the tenant")
    remove = actions.add_parser(
        "remove",
        help="remove a tenant",
        summary="Remove a tenant with all its keys.",
        examples=("goodput tenants remove acme --file tenants.txt",),
    )
    remove.add_argument("name", metavar="NAME", help="name of the tenant")
    listing = actions.add_parser(
        "list",
        help="list the tenants",
        summary="Check the file, and list the tenants.",
        examples=("goodput tenants list --file tenants.txt",),
    )
    for action in (add, remove_key, remove, listing):
        action.add_argument(
            "--file", type=Path, required=True, metavar="FILE", help="the file of tenants"
        )
    return parser


def main(argv: list[str]) -> int:
    """Change or list a file of tenants.

    Raises:
        UsageError: an invalid argument.
        InputError: the file cannot be read or written, is invalid, or does not have the tenant.
    """
    args = make_parser().parse_args(argv)
    if args.action == "list":
        for tenant in _read(args.file)[0]:
            sys.stdout.write(f"{tenant.name} weight={tenant.weight} keys={len(tenant.hashes)}\n")
        return ExitCode.PASS
    listed, previous = _read(args.file, missing=args.action == "add")
    tenants = {tenant.name: tenant for tenant in listed}
    key = ""
    if args.action == "add":
        key = secrets.token_urlsafe(_KEY_BYTES)
        tenants[args.name] = _with_key(args, tenants.get(args.name), key)
    elif args.name not in tenants:
        raise InputError(f"{args.file}: no tenant {args.name}; see goodput tenants list")
    elif args.action == "remove":
        del tenants[args.name]
    else:
        tenant = tenants[args.name]
        if len(tenant.hashes) == 1:
            raise InputError(
                f"{args.file}: {args.name} has one key only; add another one before, or remove "
                "the tenant"
            )
        tenants[args.name] = replace(tenant, hashes=tenant.hashes[1:])
    content = format_tenants(tuple(tenants.values()), previous).encode(errors=_ESCAPE)
    try:
        parse_tenants(content)
    except InputError as error:
        raise InputError(f"{args.file} is unchanged: {error}") from error
    try:
        write_output(args.file, content)
    except OSError as error:
        raise InputError(f"{args.file}: the file cannot be written: {error.strerror}") from error
    if key:
        sys.stdout.write(f"{key}\n")
    return ExitCode.PASS


def _with_key(args: argparse.Namespace, tenant: Tenant | None, key: str) -> Tenant:
    """Return a tenant with one more key.

    Raises:
        InputError: the tenant has the maximum number of keys.
    """
    digest = hash_key(key)
    if tenant is None:
        return Tenant(name=args.name, weight=args.weight or 1, hashes=(digest,))
    if len(tenant.hashes) == MAX_KEYS:
        raise InputError(
            f"{args.file}: {args.name} has {MAX_KEYS} keys; remove one with goodput tenants "
            "remove-key"
        )
    return replace(tenant, weight=args.weight or tenant.weight, hashes=(*tenant.hashes, digest))


def _read(path: Path, *, missing: bool = False) -> tuple[tuple[Tenant, ...], str]:
    """Return the tenants of a file, and its text.

    Args:
        path: the file.
        missing: True to return no tenants if there is no file.

    Raises:
        InputError: the file cannot be read or is invalid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        if missing:
            return (), ""
        raise InputError(f"{path}: no such file; make it with goodput tenants add") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a file of tenants") from error
    try:
        return parse_tenants(data), data.decode(errors=_ESCAPE)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _parse_weight(text: str) -> int:
    return parse_whole(text, 1, 1000, "a weight")
