"""Syntax of the values of `replay`'s options that no other module defines.

Each function raises `ValueError` with a sentence that quotes the value.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

from goodput_core.cli import argument_type, parse_port, parse_whole
from goodput_core.units import NS_PER_S, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "at_least",
    "parse_concurrency",
    "parse_env_name",
    "parse_listen_address",
    "parse_metric_name",
    "parse_model",
    "parse_outage",
    "parse_retries",
    "parse_salt",
    "parse_timeout",
    "parse_workers",
]

_MAX_RETRIES: Final = 10
_MAX_CONCURRENCY: Final = 100_000
_MAX_WORKERS: Final = 256
_METRIC_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,199}")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `minimum`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text) or int(text) < minimum:
            raise ValueError(f"{text!r} must be an integer of at least {minimum}")
        return int(text)

    return argument_type(parse, "N")


def parse_concurrency(text: str) -> int:
    """Parse the number of clients of `--concurrency`."""
    return parse_whole(text, 1, _MAX_CONCURRENCY, "a number of clients")


def parse_workers(text: str) -> int:
    """Parse the number of processes of `--workers`."""
    return parse_whole(text, 1, _MAX_WORKERS, "a number of processes")


def parse_timeout(text: str) -> tuple[str, int]:
    """Parse `TIME` or `CLASS=TIME`; the class is empty for all requests."""
    name, _, time = text.rpartition("=")
    ns = parse_duration(time)
    if not NS_PER_S // 10 <= ns <= 86_400 * NS_PER_S:
        raise ValueError(f"{time!r} is out of range; a timeout must be between 100ms and 1d")
    return name, ns


def parse_retries(text: str) -> int:
    """Parse the number of `--retries`."""
    return parse_whole(text, 0, _MAX_RETRIES, "a number of retries")


def parse_outage(text: str) -> int:
    """Parse the length of `--outage`; returns seconds."""
    ns = parse_duration(text)
    if ns % NS_PER_S or not NS_PER_S <= ns <= 86_400 * NS_PER_S:
        raise ValueError(f"{text!r} is not an outage; give whole seconds from 1s to 1d")
    return ns // NS_PER_S


def parse_listen_address(text: str) -> tuple[str, int]:
    """Parse `PORT`, `ADDRESS:PORT` or `[ADDRESS]:PORT`; the default address is that of loopback."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]") or "127.0.0.1")
    except ValueError as error:
        raise ValueError(
            f"{text[:80]!r} has no IP address before the port; write for example 0.0.0.0:9464"
        ) from error
    return str(address), parse_port(port)


def parse_metric_name(text: str) -> str:
    """Parse the name of a gauge or a counter, without labels."""
    if not _METRIC_NAME.fullmatch(text) or text.endswith("_bucket"):
        raise ValueError(
            f"{text[:80]!r} is not a metric to record; write the name of a gauge or a counter, "
            "without labels"
        )
    return text


def parse_model(text: str) -> str:
    """Parse `SERVED` or `TRACE=SERVED`."""
    if not text.strip() or text.endswith("=") or len(text) > 512:
        raise ValueError(f"{text!r} is not a valid model; use SERVED or TRACE=SERVED")
    return text


def parse_env_name(text: str) -> str:
    """Parse the name of an environment variable."""
    if not _ENV_NAME.fullmatch(text):
        # The text may be the key itself, so it is not printed.
        raise ValueError(
            "not the name of an environment variable; store the key in a variable and give the "
            "variable's name"
        )
    return text


def parse_salt(text: str) -> str:
    """Parse a salt of prompts."""
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", text):
        raise ValueError(f"{text!r} is not a valid salt; use up to 64 letters, digits, - and _")
    return text
