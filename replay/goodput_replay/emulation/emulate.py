"""Serving in virtual time: which kind of fleet the settings ask for is chosen here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_replay.emulation.fleet import VirtualFleet
from goodput_replay.emulation.migration import Migration
from goodput_replay.emulation.pools import DisaggregatedFleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.fleet import Actor
    from goodput_replay.emulation.settings import FleetOutcome, FleetSettings
    from goodput_replay.plan import PlannedRequest

__all__ = ["emulate"]


def emulate(
    requests: Iterator[PlannedRequest],
    settings: FleetSettings,
    on_record: Callable[[PlannedRequest, RequestRecord], None],
    *,
    actors: Sequence[Actor] = (),
) -> FleetOutcome:
    """Serve requests in virtual time.

    Args:
        requests: in the order of their arrival; taken one at a time, none is kept after its end.
        settings: the fleet.
        on_record: told of each request that ended, in the order of the ends.
        actors: what changes the fleet while it runs.

    Raises:
        InputError: the settings ask for what cannot be.
    """
    fleet: VirtualFleet
    if settings.decode is None:
        fleet = VirtualFleet(settings, on_record)
    else:
        fleet = DisaggregatedFleet(settings, settings.decode, on_record)
    rules = settings.migration
    if rules is None:
        return fleet.run(requests, actors)
    profile = settings.profile
    migration = Migration(rules, block_bytes=profile.block_size * profile.kv_bytes_per_token)
    outcome = fleet.run(requests, [*actors, migration])
    migration.close()
    return replace(
        outcome,
        migrations=migration.completed,
        migrations_aborted=migration.aborted,
        migrated_blocks=migration.copied_blocks,
    )
