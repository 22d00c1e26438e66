"""Configuration and outcome of a fleet in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.control import ServiceParams
from goodput_core.declaration import spec_field
from goodput_core.engine_state import EngineStatistics
from goodput_core.errors import InputError, SpecError
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.spec.codec import decode
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import configuration
from goodput_engine.device.choice import budget_problem, choose_device
from goodput_engine.device.profile import DeviceProfile
from goodput_engine.manifest_file import read_document
from goodput_engine.messages import Configure
from goodput_engine.scheduler.policy import SchedulingPolicy
from goodput_replay.runs.slo import SLOClasses, slo_classes

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = [
    "DecodePool",
    "FleetOutcome",
    "FleetSettings",
    "LinkSpec",
    "MigrationSpec",
    "PoolSpec",
    "TopologySpec",
    "apply_topology",
    "fleet_settings",
    "read_topology",
]


_BYTES_PER_GB: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Replicas that only prefill or only decode."""

    replicas: int = spec_field("Number of replicas.", minimum=1, maximum=1_000)
    token_budget: int | None = spec_field(
        "Token budget of a step; defaults to the manifest's.",
        default=None,
        minimum=1,
        maximum=1_048_576,
    )
    max_num_seqs: int | None = spec_field(
        "Maximum number of running requests per replica; defaults to the manifest's.",
        default=None,
        minimum=1,
        maximum=65_536,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Link over which keys and values are copied."""

    gb_per_second: int | None = spec_field(
        "Bandwidth per replica, 10⁹ bytes/s; defaults to the device profile's.",
        default=None,
        minimum=1,
        maximum=100_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """Settings of live migration."""

    below_blocks: int = spec_field(
        "A replica is a source while its freeness is below this: its free blocks, less those that "
        "the first queued request needs, per request.",
        default=3,
        minimum=0,
        maximum=1_000_000,
    )
    poll_ms: int = spec_field(
        "Time between two comparisons of the freeness of replicas.",
        default=50,
        minimum=1,
        maximum=60_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySpec:
    """Topology: separate prefill and decode pools, or replicas with live migration."""

    prefill: PoolSpec | None = spec_field(
        "Replicas that compute prompts and first tokens.", default=None
    )
    decode: PoolSpec | None = spec_field("Replicas that compute all other tokens.", default=None)
    migration: MigrationSpec | None = spec_field(
        "Live migration of decoding requests.", default=None
    )
    link: LinkSpec = spec_field("Link of each replica.", factory=LinkSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """Pool of decode replicas.

    Args:
        replicas: number of replicas.
        configure: engine configuration of each replica.
    """

    replicas: int
    configure: Configure


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Control settings of a manifest.

    Args:
        params: parameters of the control laws.
        interval_ns: time between two decisions.
    """

    params: ServiceParams
    interval_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of an emulated fleet.

    Args:
        service: service name; replicas are named `<service>-0`, `<service>-1`, ….
        profile: device profile of every replica; its link transfers KV blocks between replicas.
        configure: engine configuration of every replica.
        replicas: number of ready replicas at time zero.
        placement: placement policy.
        slo: SLO classes; if there are any, a request of a class that is not one of them is an
            error.
        timeout_ns: time limit of a request from its scheduled arrival.
        seed: seed of random placement.
        oracle: True to schedule by true output length in place of the policy, which gives an upper
            bound that no real policy reaches.
        build_policy: builds the policy of each replica in place of the one that `configure` names;
            None for that one.
        fast_forward: True to compute predictable steps at once; affects speed only.
        decode: decode pool, with which `replicas` and `configure` describe the prefill pool; None
            if every replica both prefills and decodes.
        migration: settings of live migration; None if requests are not moved. Not with `decode`.
        control: control settings; None if the mode is `Manual`. They take effect only through a
            `ControlLoop` among the actors.
    """

    service: str
    profile: DeviceProfile
    configure: Configure
    replicas: int
    placement: RouterPolicy
    slo: SLOClasses
    timeout_ns: int
    seed: int = 0
    oracle: bool = False
    build_policy: Callable[[], SchedulingPolicy] | None = None
    fast_forward: bool = True
    decode: DecodePool | None = None
    migration: MigrationSpec | None = None
    control: ControlSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome(EngineStatistics):
    """Totals of a run, with the summed counters of all engines; all 0 if the run did not complete.

    Args:
        end_ns: end time of the last request.
        requests: number of received requests.
        peak_in_flight: maximum number of requests on all replicas at a time.
        replica_ns: summed lifetime of all replicas, from creation to removal or the end.
        peak_replicas: maximum number of replicas, including starting and draining ones.
        final_replicas: number of replicas at the end, excluding draining ones.
        events: number of received requests and of engine calls for steps.
        migrations, migrations_aborted: number of completed and of aborted live migrations.
        migrated_blocks: KV blocks copied by all migrations.
    """

    end_ns: int = 0
    requests: int = 0
    peak_in_flight: int = 0
    replica_ns: int = 0
    peak_replicas: int = 0
    final_replicas: int = 0
    events: int = 0
    migrations: int = 0
    migrations_aborted: int = 0
    migrated_blocks: int = 0


def fleet_settings(
    service: LLMService,
    *,
    device: str | None,
    source: str,
    timeout_ns: int,
    seed: int = 0,
    oracle: bool = False,
) -> FleetSettings:
    """Return the fleet settings of a manifest.

    Args:
        service: the manifest.
        device: device profile in place of `spec.model.source`; None to use the manifest's.
        source: file of the manifest, for error messages.
        timeout_ns: time limit of a request.
        seed: seed of random placement.
        oracle: True to schedule by true output length.

    Raises:
        UnsupportedError: the manifest has real weights, and no device is given.
        InputError: the device profile does not exist.
        SpecError: the profile's number of devices differs from `tensorParallel`.
    """
    spec = service.spec
    name, profile = choose_device(spec, device=device, source=source)
    control = None
    if spec.control.mode is not ControlMode.MANUAL:
        startup_ns = round(profile.startup_seconds * NS_PER_S)
        control = ControlSettings(
            params=replace(ServiceParams.of(spec), default_startup_ns=startup_ns),
            interval_ns=spec.control.interval_seconds * NS_PER_S,
        )
    return FleetSettings(
        service=service.metadata.name,
        profile=profile,
        configure=configuration(spec.engine, mode=spec.control.mode, device=name),
        replicas=spec.initial_replicas,
        placement=spec.router.policy,
        slo=slo_classes(spec.slo),
        timeout_ns=timeout_ns,
        seed=seed,
        oracle=oracle,
        control=control,
    )


def read_topology(path: Path) -> TopologySpec:
    """Read a topology file.

    Raises:
        InputError: the file cannot be read, is too large, or is not YAML.
        SpecError: a field is invalid, or the file defines neither two pools nor migration, or both.
            The error names the file and the field.
    """
    try:
        topology = decode(TopologySpec, read_document(path), "")
        for name, pool in (("prefill", topology.prefill), ("decode", topology.decode)):
            if topology.migration is None and pool is None:
                raise SpecError(
                    name, "is required; a topology has either prefill and decode, or migration"
                )
            if topology.migration is not None and pool is not None:
                raise SpecError(name, "is mutually exclusive with migration; remove one of them")
        return topology
    except SpecError as error:
        raise error.at(str(path)) from error


def apply_topology(settings: FleetSettings, topology: TopologySpec) -> FleetSettings:
    """Return the settings with a topology; pools replace the manifest's replicas.

    Raises:
        InputError: the topology has two pools, and the settings have control laws.
    """
    if topology.link.gb_per_second is not None:
        link_bytes_per_s = topology.link.gb_per_second * _BYTES_PER_GB
        profile = replace(settings.profile, link_bytes_per_s=link_bytes_per_s)
        settings = replace(settings, profile=profile)
    if topology.migration is not None:
        return replace(settings, migration=topology.migration)
    if settings.control is not None:
        raise InputError(
            "--topology: the control laws do not support two pools; set spec.control.mode "
            "to Manual for two pools"
        )
    assert topology.prefill is not None, "read_topology requires both pools"
    assert topology.decode is not None, "read_topology requires both pools"
    for name, pool in (("prefill", topology.prefill), ("decode", topology.decode)):
        if pool.token_budget is not None:
            problem = budget_problem(pool.token_budget, settings.profile)
            if problem is not None:
                raise InputError(f"--topology: {name}.tokenBudget: {problem}")
    return replace(
        settings,
        replicas=topology.prefill.replicas,
        configure=_configure_pool(settings.configure, topology.prefill),
        decode=DecodePool(
            replicas=topology.decode.replicas,
            configure=_configure_pool(settings.configure, topology.decode),
        ),
    )


def _configure_pool(configure: Configure, pool: PoolSpec) -> Configure:
    """Return the engine configuration with the values of a pool."""
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
