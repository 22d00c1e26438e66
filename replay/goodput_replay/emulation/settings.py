"""What a fleet in virtual time is made of, and what came of it, apart from its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from goodput_core.control.params import ServiceParams
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.units import NS_PER_S
from goodput_engine.core.configuration import configuration
from goodput_engine.device.profile import DeviceProfile
from goodput_engine.messages import Configure
from goodput_engine.server.device_choice import choose_device
from goodput_replay.run.facts import Promise

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

__all__ = ["DecodePool", "FleetOutcome", "FleetSettings", "MigrationRules", "fleet_settings"]


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
        promise: the classes; a request of another one is refused, unless there are none.
        timeout_ns: how long a request may take from its scheduled arrival.
        seed: of what placement draws at random.
        oracle: schedule the shortest first by true lengths, whatever the policy: a bound.
        folds: take steps that are known in advance at once; without, the same comes out later.
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
    promise: Promise
    timeout_ns: int
    seed: int = 0
    oracle: bool = False
    folds: bool = True
    decode: DecodePool | None = None
    migration: MigrationRules | None = None
    control: ControlRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """What a run amounts to beside its requests; sums over all replicas.

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

    end_ns: int
    requests: int
    peak_in_flight: int
    replica_ns: int
    peak_replicas: int
    final_replicas: int
    events: int
    steps: int
    step_ns: int
    scheduled_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    migrations: int = 0
    migrations_aborted: int = 0
    migrated_blocks: int = 0


def fleet_settings(
    service: LLMService,
    *,
    device: str | None,
    source: str,
    promise: Promise,
    timeout_ns: int,
    seed: int = 0,
    oracle: bool = False,
) -> FleetSettings:
    """The fleet that a manifest describes.

    Args:
        service: the manifest.
        device: `--device`, in place of `spec.model.source`.
        source: the manifest's file, for errors.
        promise: of the manifest's `spec.slo`.
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
        promise=promise,
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
