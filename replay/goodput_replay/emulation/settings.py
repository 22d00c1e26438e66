"""What a fleet in virtual time is made of, and what came of it, apart from its requests."""

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
    """Replicas that decode what others have prefilled.

    Args:
        replicas: how many.
        configure: what the core of each runs.
        link_bytes_per_s: at which keys and values come to one, and leave one that prefills.
    """

    replicas: int
    configure: Configure
    link_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRules:
    """When running requests move to another replica.

    Args:
        below_blocks: from a replica whose requests could each grow by fewer blocks than this.
        poll_ns: how often the replicas are compared.
        link_bytes_per_s: at which keys and values leave one replica and come to another.
    """

    below_blocks: int
    poll_ns: int
    link_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRules:
    """What a manifest says of control.

    Args:
        params: of the law.
        interval_ns: between two decisions.
    """

    params: ServiceParams
    interval_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A service on modelled devices.

    Args:
        service: its name; replicas are called `<service>-0`, `<service>-1`, ….
        profile: the device of every replica.
        configure: what every replica's core runs.
        replicas: how many there are at zero, all of them ready.
        placement: which law spreads the requests.
        slo: the classes; a request of another class is refused, unless there are none.
        timeout_ns: how long a request may take from its scheduled arrival.
        seed: of what placement draws at random.
        oracle: schedule the shortest first by true lengths, whatever the policy: a bound.
        fast_forward: True to compute predictable steps at once; affects speed only.
        decode: with it `replicas` and `configure` are those of replicas that only prefill.
        migration: whether requests move; not with `decode`.
        control: what the manifest says of control; None: its mode is `Manual`. It takes effect
            through a `ControlLoop` among the actors.
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
        end_ns: when the last request ended, at least the last arrival.
        requests: how many arrived.
        peak_in_flight: most of them on replicas at once.
        replica_ns: time for which replicas existed, from created to gone or to the end.
        peak_replicas: most of them at once, starting and draining ones too.
        final_replicas: those at the end that were not draining.
        events: how often an engine was called, for a request that came or for steps to take.
        steps: steps of all replicas.
        step_ns: their summed device time.
        scheduled_tokens: computed, recomputed ones too.
        output_tokens: emitted.
        preemptions: requests sent back to wait.
        recomputed_tokens, swapped_tokens: of these: computed again, or copied to host memory.
        prefix_queried_tokens, prefix_hit_tokens: of admitted prompts.
        migrations, migrations_aborted: moves of running requests that came to their end, and that
            were given up.
        migrated_blocks: KV blocks copied for both.
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
    """The fleet that a manifest describes.

    Args:
        service: the manifest.
        device: `--device`, in place of `spec.model.source`.
        source: the manifest's file, for errors.
        slo: the classes of the manifest.
        timeout_ns: how long a request may take.
        seed: of what placement draws at random.
        oracle: whether true lengths order the requests.

    Raises:
        NotBuiltError: real weights, and no device.
        InputError: no such device profile.
        SpecError: the profile is of another number of devices than `tensorParallel`.
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
    """The control law in the loop, unless the manifest wants none."""
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
