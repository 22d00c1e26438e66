"""Serve requests in virtual time with the fleet that the settings describe."""

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
    from goodput_replay.sessions import FollowUps

__all__ = ["emulate"]


def emulate(
    requests: Iterator[PlannedRequest],
    settings: FleetSettings,
    on_record: Callable[[PlannedRequest, RequestRecord], None],
    *,
    follow_ups: FollowUps | None = None,
    actors: Sequence[Actor] = (),
) -> FleetOutcome:
    """Run the fleet until all requests have ended, and return its totals.

    Args:
        requests: requests in arrival order; read one at a time and released when they end.
        settings: fleet configuration.
        on_record: called when a request has ended, with the request and its record, in the order of
            end times.
        follow_ups: requests that follow others, which `requests` does not contain; None if all
            arrivals are independent.
        actors: components that change the fleet during the run.

    Raises:
        InputError: the settings are invalid.
        ValueError: actors for a fleet of two pools.
    """
    if settings.decode is not None:
        if actors:
            raise ValueError("a fleet of two pools does not support actors")
        return DisaggregatedFleet(settings, settings.decode, on_record).run(
            requests, (), follow_ups
        )
    fleet = VirtualFleet(settings, on_record)
    if settings.migration is None:
        return fleet.run(requests, actors, follow_ups)
    migration = Migration(settings.migration, settings.profile)
    outcome = fleet.run(requests, [*actors, migration], follow_ups)
    migration.close()
    return replace(
        outcome,
        migrations=migration.completed,
        migrations_aborted=migration.aborted,
        migrated_blocks=migration.copied_blocks,
    )
