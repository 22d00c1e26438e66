"""`--topology FILE`: replicas that prefill or decode, or that give each other requests.

In virtual time only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.decode import decode
from goodput_core.spec.fields import spec_field
from goodput_core.units import NS_PER_MS
from goodput_engine.manifest_file import read_document
from goodput_replay.emulation.settings import DecodePool, FleetSettings, MigrationRules

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.messages import Configure

__all__ = [
    "LinkSpec",
    "MigrationSpec",
    "PoolSpec",
    "TopologySpec",
    "apply_topology",
    "read_topology",
]

_MAX_TOKENS: Final = 1_048_576
_BYTES_PER_GB: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Replicas that do one of the two."""

    replicas: int = spec_field("How many there are.", minimum=1, maximum=1_000)
    token_budget: int | None = spec_field(
        "Tokens that one of their steps may compute; the manifest's without it.",
        default=None,
        minimum=1,
        maximum=_MAX_TOKENS,
    )
    max_num_seqs: int | None = spec_field(
        "Most requests that run at once on one; the manifest's without it.",
        default=None,
        minimum=1,
        maximum=65_536,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """What keys and values travel over."""

    gb_per_second: int | None = spec_field(
        "Of one replica, 10⁹ bytes; the device profile's without it.",
        default=None,
        minimum=1,
        maximum=100_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """When requests that decode move to another replica."""

    below_blocks: int = spec_field(
        "A replica gives requests away while each of its own could grow by fewer blocks than this.",
        default=3,
        minimum=0,
        maximum=1_000_000,
    )
    poll_ms: int = spec_field(
        "How often the replicas are compared.", default=50, minimum=1, maximum=60_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpec:
    """Prefill here and decode there, or replicas that do both and give each other requests."""

    prefill: PoolSpec | None = spec_field(
        "Replicas that compute prompts and first tokens.", default=None
    )
    decode: PoolSpec | None = spec_field("Replicas that compute all other tokens.", default=None)
    migration: MigrationSpec | None = spec_field(
        "Requests that decode move between replicas.", default=None
    )
    link: LinkSpec = spec_field("Between any two.", factory=LinkSpec)


def read_topology(path: Path) -> TopologySpec:
    """The topology of a file.

    Raises:
        InputError: the file cannot be read, is too large, or is no YAML.
        SpecError: a field that breaks a rule, by file and path.
    """
    try:
        topology = decode(TopologySpec, read_document(path), "")
        _check(topology)
        return topology
    except SpecError as error:
        raise error.at(str(path)) from error


def apply_topology(settings: FleetSettings, topology: TopologySpec) -> FleetSettings:
    """The same service on that topology; pools stand in place of the manifest's replicas.

    Raises:
        InputError: two pools under a control law.
    """
    rate = topology.link.gb_per_second
    link = settings.profile.link_bytes_per_s if rate is None else rate * _BYTES_PER_GB
    if topology.migration is not None:
        rules = MigrationRules(
            below_blocks=topology.migration.below_blocks,
            poll_ns=topology.migration.poll_ms * NS_PER_MS,
            link_bytes_per_s=link,
        )
        return replace(settings, migration=rules)
    if settings.control is not None:
        raise InputError(
            "--topology: the control law knows replicas of one kind only; set spec.control.mode "
            "to Manual for two pools"
        )
    assert topology.prefill is not None, "it was checked"
    assert topology.decode is not None, "it was checked"
    return replace(
        settings,
        replicas=topology.prefill.replicas,
        configure=_of_pool(settings.configure, topology.prefill),
        decode=DecodePool(
            replicas=topology.decode.replicas,
            configure=_of_pool(settings.configure, topology.decode),
            link_bytes_per_s=link,
        ),
    )


def _check(topology: TopologySpec) -> None:
    """Two pools, or migration.

    Raises:
        SpecError: both, neither, or one pool.
    """
    pools = {"prefill": topology.prefill, "decode": topology.decode}
    if topology.migration is None:
        for name, pool in pools.items():
            if pool is None:
                raise SpecError(
                    name, "is required; a topology has prefill and decode, or migration"
                )
        return
    for name, pool in pools.items():
        if pool is not None:
            raise SpecError(name, "cannot be together with migration; take one of them out")


def _of_pool(configure: Configure, pool: PoolSpec) -> Configure:
    budget = pool.token_budget
    if budget is not None:
        configure = msgspec.structs.replace(
            configure,
            token_budget=budget,
            min_token_budget=min(budget, configure.min_token_budget),
            max_token_budget=max(budget, configure.max_token_budget),
        )
    if pool.max_num_seqs is not None:
        configure = msgspec.structs.replace(configure, max_num_seqs=pool.max_num_seqs)
    return configure
