"""From EndpointSlices to replicas: what the API server says of a headless Service's pods.

Pods that are not ready yet are replicas too: whether one may get requests the router finds out
itself, sooner than the API server hears of it. Pods that terminate are none.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.contract import PORT_NAME_ADMIN, PORT_NAME_SERVING
from goodput_engine.router.upstreams import MAX_UPSTREAMS, Upstream

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["EndpointSlice", "upstreams_of"]


class _Conditions(msgspec.Struct, frozen=True):
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of one; the rest is passed over."""

    metadata: _Metadata = _Metadata()
    address_type: str = ""
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


_FAMILIES: Final = ("IPv4", "IPv6")


def upstreams_of(slices: Iterable[EndpointSlice]) -> tuple[Upstream, ...]:
    """The replicas of a Service, by name; each once, at its address of the older family.

    More than a router can follow are cut off: the first by name stay.
    """
    found: dict[str, Upstream] = {}
    for family in reversed(_FAMILIES):
        for one in slices:
            if one.address_type == family:
                found |= _of_slice(one)
    return tuple(found[name] for name in sorted(found)[:MAX_UPSTREAMS])


def _of_slice(one: EndpointSlice) -> dict[str, Upstream]:
    ports = {port.name: port.port for port in one.ports or ()}
    serving, admin = ports.get(PORT_NAME_SERVING), ports.get(PORT_NAME_ADMIN)
    found: dict[str, Upstream] = {}
    if serving is None:
        return found
    for endpoint in one.endpoints or ():
        if endpoint.conditions.terminating or not endpoint.addresses:
            continue
        address = _host(endpoint.addresses[0])
        if address is None:
            continue
        name = (endpoint.target_ref.name if endpoint.target_ref else "") or address
        found[name] = Upstream(
            name=name,
            url=f"http://{address}:{serving}",
            admin_url=None if admin is None else f"http://{address}:{admin}",
        )
    return found


def _host(address: str) -> str | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)
