"""Configuration and outcome of a fleet in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.control import ServiceParams
from goodput_core.errors import InputError, SpecError
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.spec.codec import decode
from goodput_core.spec.declaration import spec_field
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import configuration
from goodput_engine.device.profile import DeviceProfile
from goodput_engine.manifest_file import read_document
from goodput_engine.messages import Configure
from goodput_engine.server.device_choice import choose_device
from goodput_replay.run.slo import SLOClasses

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

__all__ = [
    "DecodePool",
    "FleetOutcome",
    "FleetSettings",
    "LinkSpec",
    "MigrationRules",
    "MigrationSpec",
    "PoolSpec",
    "TopologySpec",
    "apply_topology",
    "fleet_settings",
    "read_topology",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """Pool of decode replicas.

    Args:
        replicas: number of replicas.
        configure: engine configuration of each replica.
        link_bytes_per_s: bandwidth of each replica's link for keys and values.
    """

    replicas: int
    configure: Configure
    link_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRules:
    """Rules of live migration.

    Args:
        below_blocks: a replica is a source if it has fewer free blocks per request than this.
        poll_ns: time between two comparisons of the replicas.
        link_bytes_per_s: bandwidth of each replica's link for keys and values.
    """

    below_blocks: int
    poll_ns: int
    link_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """Control settings of a manifest.

    Args:
        params: parameters of the control laws.
        interval_ns: time between two decisions.
    """

    params: ServiceParams
    interval_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A service on modelled devices.

    Args:
        service: service name; replicas are named `<service>-0`, `<service>-1`, ….
        profile: device profile of every replica.
        configure: engine configuration of every replica.
        replicas: number of ready replicas at time zero.
        placement: placement policy.
        slo: SLO classes; unless empty, requests of other classes are errors.
        timeout_ns: time limit of a request from its scheduled arrival.
        seed: seed of random placement.
        oracle: True to schedule by true output length in place of the policy; a bound.
        fast_forward: True to compute predictable steps at once; affects speed only.
        decode: decode pool; if set, `replicas` and `configure` describe the prefill pool.
        migration: rules of live migration; not with `decode`.
        control: control settings; None if the mode is `Manual`. Only applied by a `ControlLoop`
            among the actors.
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
    fast_forward: bool = True
    decode: DecodePool | None = None
    migration: MigrationRules | None = None
    control: ControlRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """Totals of a run over all replicas; zeros for a run that did not complete.

    Args:
        end_ns: end time of the last request.
        requests: number of received requests.
        peak_in_flight: maximum number of requests on replicas.
        replica_ns: summed lifetime of all replicas, from creation to removal or the end.
        peak_replicas: maximum number of replicas, including starting and draining ones.
        final_replicas: replicas at the end, excluding draining ones.
        events: number of engine calls, for submissions and for steps.
        steps: number of steps of all replicas.
        step_ns: summed device time of the steps.
        scheduled_tokens: computed tokens, including recomputed ones.
        output_tokens: emitted tokens.
        preemptions: number of preemptions.
        recomputed_tokens, swapped_tokens: tokens recomputed, or copied to host memory, after
            preemptions.
        prefix_queried_tokens, prefix_hit_tokens: prompt tokens looked up, and found, in the
            prefix cache.
        migrations, migrations_aborted: completed and aborted live migrations.
        migrated_blocks: KV blocks copied by all migrations.
    """

    end_ns: int = 0
    requests: int = 0
    peak_in_flight: int = 0
    replica_ns: int = 0
    peak_replicas: int = 0
    final_replicas: int = 0
    events: int = 0
    steps: int = 0
    step_ns: int = 0
    scheduled_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    migrations: int = 0
    migrations_aborted: int = 0
    migrated_blocks: int = 0


def fleet_settings(
    service: LLMService,
    *,
    device: str | None,
    source: str,
    slo: SLOClasses,
    timeout_ns: int,
    seed: int = 0,
    oracle: bool = False,
) -> FleetSettings:
    """Return the fleet settings of a manifest.

    Args:
        service: the manifest.
        device: device profile in place of `spec.model.source`; None to use the manifest's.
        source: file of the manifest, for error messages.
        slo: SLO classes of the manifest.
        timeout_ns: time limit of a request.
        seed: seed of random placement.
        oracle: True to schedule by true output length.

    Raises:
        NotBuiltError: the manifest has real weights, and no device is given.
        InputError: the device profile does not exist.
        SpecError: the profile's number of devices differs from `tensorParallel`.
    """
    spec = service.spec
    name, profile = choose_device(spec, asked=device, source=source)
    return FleetSettings(
        service=service.metadata.name,
        profile=profile,
        configure=configuration(spec.engine, mode=spec.control.mode, device=name),
        replicas=spec.initial_replicas,
        placement=spec.router.policy,
        slo=slo,
        timeout_ns=timeout_ns,
        seed=seed,
        oracle=oracle,
        control=_control(spec, profile),
    )


def _control(spec: LLMServiceSpec, profile: DeviceProfile) -> ControlRules | None:
    """Return the control settings; None in mode `Manual`."""
    if spec.control.mode is ControlMode.MANUAL:
        return None
    startup_ns = round(profile.startup_seconds * NS_PER_S)
    return ControlRules(
        params=replace(ServiceParams.of(spec), default_startup_ns=startup_ns),
        interval_ns=spec.control.interval_seconds * NS_PER_S,
    )


_MAX_TOKENS: Final = 1_048_576
_BYTES_PER_GB: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Replicas that only prefill or only decode."""

    replicas: int = spec_field("Number of replicas.", minimum=1, maximum=1_000)
    token_budget: int | None = spec_field(
        "Token budget of a step; defaults to the manifest's.",
        default=None,
        minimum=1,
        maximum=_MAX_TOKENS,
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
    """Rules of live migration."""

    below_blocks: int = spec_field(
        "A replica is a source while it has fewer free blocks per request than this.",
        default=3,
        minimum=0,
        maximum=1_000_000,
    )
    poll_ms: int = spec_field(
        "Time between two comparisons of the replicas.", default=50, minimum=1, maximum=60_000
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


def read_topology(path: Path) -> TopologySpec:
    """Read a topology file.

    Raises:
        InputError: the file cannot be read, is too large, or is not YAML.
        SpecError: a field is invalid; names the file and the path of the field.
    """
    try:
        topology = decode(TopologySpec, read_document(path), "")
        _check(topology)
        return topology
    except SpecError as error:
        raise error.at(str(path)) from error


def apply_topology(settings: FleetSettings, topology: TopologySpec) -> FleetSettings:
    """Apply a topology to the settings; pools replace the manifest's replicas.

    Raises:
        InputError: two pools with a control law.
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
            "--topology: the control laws do not support two pools; set spec.control.mode "
            "to Manual for two pools"
        )
    assert topology.prefill is not None, "checked"
    assert topology.decode is not None, "checked"
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
    """Check that the topology has either two pools or migration.

    Raises:
        SpecError: it has both, neither, or a single pool.
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
            raise SpecError(name, "is mutually exclusive with migration; remove one of them")


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
