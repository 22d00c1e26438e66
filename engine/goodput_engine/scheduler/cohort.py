"""The requests that decode one token in every step, kept so that a step costs what changes.

In steady decoding nothing differs between two steps but that every member has one more token.
So members are not visited: the cohort counts *epochs* (steps that decoded), a member remembers
the epoch in which it joined, and its counters follow by subtraction. What a member will need
(a block, an end at its output limit) is filed under the epoch in which it will need it.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from goodput_engine.scheduler.plan import Join
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Container

    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["DecodeCohort"]


class DecodeCohort:
    """Members in the order of their joining, so that joined epochs never fall along it.

    Args:
        block_size: tokens per KV block.
    """

    __slots__ = (
        "_block_size",
        "_due",
        "_joined",
        "_left",
        "_paces",
        "committed_epoch",
        "epoch",
        "last_plan",
        "members",
        "total_context",
    )

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.members: dict[int, ScheduledRequest] = {}
        self.epoch = 0
        self.committed_epoch = 0
        self.last_plan = 0
        """The plan of the latest epoch."""
        self.total_context = 0
        """Computed tokens of all members, in-flight ones included."""
        self._due: dict[int, list[ScheduledRequest]] = {}
        self._joined: list[ScheduledRequest] = []
        self._left: list[int] = []
        self._paces: dict[int, int] = {}
        """Of the times per token that members were promised, to how many."""

    def join(self, request: ScheduledRequest) -> None:
        """A request that is one token behind decodes from the next epoch on.

        It must have a slot for that token's keys and values, and an output token left.
        """
        request.cohort = self
        request.state = RequestState.DECODING
        request.joined_epoch = self.epoch
        request.last_epoch = self.epoch + request.output_limit - request.base_sampled
        self.members[request.rid] = request
        self.total_context += request.base_planned
        self._joined.append(request)
        pace_ns = request.targets.pace_ns
        if pace_ns is not None:
            self._paces[pace_ns] = self._paces.get(pace_ns, 0) + 1
        self.file(request)

    @property
    def tightest_ns(self) -> int | None:
        """The smallest time per token that any member was promised; None: nobody was."""
        return min(self._paces, default=None)

    def file(self, request: ScheduledRequest) -> None:
        """File the next epoch in which a member needs attention."""
        slots = len(request.blocks) * self._block_size - request.base_planned
        self._file(request, min(request.joined_epoch + slots + 1, request.last_epoch))

    def _file(self, request: ScheduledRequest, epoch: int) -> None:
        request.event_epoch = epoch
        due = self._due.get(epoch)
        if due is None:
            self._due[epoch] = [request]
        else:
            due.append(request)

    @property
    def due_epochs(self) -> Container[int]:
        """Epochs under which somebody is filed."""
        return self._due

    def give_blocks(self, epoch: int, kv: BlockPool, spare: int) -> list[tuple[int, int]] | None:
        """A block for each member that is due in the next epoch.

        Args:
            epoch: its number; somebody is filed under it.
            kv: where from.
            spare: blocks that must be left there.

        Returns:
            (rid, block) of each; None: that is not all they need, and nothing has changed.
            Somebody decodes for the last time, or there may not be enough blocks.
        """
        filed = self._due[epoch]
        if len(filed) > kv.free_blocks - spare:
            return None
        for request in filed:
            if request.last_epoch == epoch and request.event_epoch == epoch:
                return None
        del self._due[epoch]
        next_epoch = epoch + self._block_size
        given: list[tuple[int, int]] = []
        for request in filed:
            if request.event_epoch == epoch and request.cohort is not None:
                block = kv.allocate_one()
                assert block is not None
                request.blocks.append(block)
                given.append((request.rid, block))
                self._file(request, min(next_epoch, request.last_epoch))
        return given

    def take_due(self, epoch: int) -> list[ScheduledRequest]:
        """Members that need a block for the next epoch, or decode for the last time in it."""
        filed = self._due.pop(epoch, None)
        if filed is None:
            return []
        due: list[ScheduledRequest] = []
        for request in filed:
            if request.cohort is not None and request.event_epoch == epoch:
                request.event_epoch = 0  # filed twice, if it left and came back: taken once
                due.append(request)
        return due

    def most_blocks_due(self, epochs: int) -> int:
        """A bound on the blocks that members can need within the next epochs."""
        return len(self.members) * (-(-epochs // self._block_size))

    def blocks_due(self, epochs: int) -> list[ScheduledRequest]:
        """Members that need a block within the next epochs, in that order, each once."""
        due: list[ScheduledRequest] = []
        for epoch in range(self.epoch + 1, self.epoch + epochs + 1):
            due += [
                r
                for r in self._due.get(epoch, ())
                if r.cohort is not None
                and r.event_epoch == epoch
                and r.computed_tokens + epoch - self.epoch > len(r.blocks) * self._block_size
            ]
        return due

    def needs_block(self, request: ScheduledRequest) -> bool:
        """Whether this member has no slot for its next token."""
        return request.computed_tokens == len(request.blocks) * self._block_size

    def advance(self, plan_id: int) -> None:
        """Every member decodes one token in this plan."""
        self.epoch += 1
        self.total_context += len(self.members)
        self.last_plan = plan_id

    def advance_by(self, epochs: int, *, committed: int, plan_id: int) -> None:
        """So many epochs in which nobody joins or leaves.

        Args:
            epochs: how many.
            committed: the latest that is done.
            plan_id: the plan of the latest.
        """
        self.epoch += epochs
        self.committed_epoch = committed
        self.total_context += epochs * len(self.members)
        self.last_plan = plan_id

    def leave(self, request: ScheduledRequest) -> None:
        """A member decodes no more and counts for itself again; its state is for the caller."""
        decoded = self.epoch - request.joined_epoch
        request.base_planned += decoded
        request.base_sampled += decoded
        request.base_emitted += max(0, self.committed_epoch - request.joined_epoch)
        request.cohort = None
        del self.members[request.rid]
        pace_ns = request.targets.pace_ns
        if pace_ns is not None:
            self._paces[pace_ns] -= 1
            if not self._paces[pace_ns]:
                del self._paces[pace_ns]
        self.total_context -= request.base_planned
        if decoded:
            request.last_plan = self.last_plan
            self._left.append(request.rid)
        else:  # no plan has told of its joining yet
            self._joined.remove(request)

    def take_changes(self) -> tuple[tuple[Join, ...], tuple[int, ...]]:
        """Who joined and who left since the last plan that was told."""
        joined: tuple[Join, ...] = ()
        left: tuple[int, ...] = ()
        if self._joined:
            joined = tuple(
                Join(rid=r.rid, start=r.base_planned, output_tokens=r.base_sampled)
                for r in self._joined
            )
            self._joined.clear()
        if self._left:
            left = tuple(self._left)
            self._left.clear()
        return joined, left

    def decoded_in(self, epoch: int) -> list[int]:
        """The members, by rid, that decoded in this epoch, in order."""
        members = self.members
        later = 0
        for request in reversed(members.values()):
            if request.joined_epoch < epoch:
                break
            later += 1
        return list(islice(members, len(members) - later)) if later else list(members)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums over all members agree with the counters."""
        assert self.total_context == sum(r.computed_tokens for r in self.members.values())
        epochs = [r.joined_epoch for r in self.members.values()]
        assert epochs == sorted(epochs), "members are out of order"
        paces = [r.targets.pace_ns for r in self.members.values()]
        assert self._paces == Counter(pace for pace in paces if pace is not None)
        for request in self.members.values():
            assert request.state is RequestState.DECODING
            assert request.total_tokens == request.computed_tokens + 1
            assert any(r is request for r in self._due[request.event_epoch])
