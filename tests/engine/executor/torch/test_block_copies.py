"""Copies of KV blocks run on streams of their own, and no block is reused before its copy."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import ModelBench, TinyModel

from goodput_core.spec.choices import Preemption
from goodput_engine.executor.torch.block_copies import BlockCopies, CudaStreams, StreamName
from goodput_engine.scheduler.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.torch

BLOCKS = 6
HOST_BLOCKS = 4


class StreamEvent:
    """An event of the streams below."""

    def __init__(self) -> None:
        self.done = False


class ManualStreams:
    """Streams whose work runs when a test lets it run."""

    def __init__(self) -> None:
        self._work: dict[StreamName, deque[StreamEvent | Callable[[], object]]] = {
            name: deque() for name in StreamName
        }

    def record(self, name: StreamName) -> StreamEvent:
        event = StreamEvent()
        self.add(name, lambda: setattr(event, "done", True))
        return event

    def wait(self, name: StreamName, event: object) -> None:
        assert isinstance(event, StreamEvent)
        self._work[name].append(event)

    def is_done(self, event: object) -> bool:
        assert isinstance(event, StreamEvent)
        return event.done

    def copy(self, name: StreamName, source: torch.Tensor, target: torch.Tensor) -> None:
        self.add(name, lambda: target.copy_(source))

    def add(self, name: StreamName, work: Callable[[], object]) -> None:
        """Add work to a stream."""
        self._work[name].append(work)

    def run_one(self, name: StreamName) -> bool:
        """Run the next work of a stream; return False if there is none, or if it must wait."""
        queue = self._work[name]
        while queue and isinstance(queue[0], StreamEvent):
            if not queue[0].done:
                return False
            queue.popleft()
        if not queue:
            return False
        work = queue.popleft()
        assert not isinstance(work, StreamEvent)
        work()
        return True

    def run_until(self, event: StreamEvent) -> None:
        """Run as little as possible until an event is done."""
        while not event.done:
            assert any(self.run_one(name) for name in StreamName), "streams wait for each other"

    def run_all(self) -> None:
        while any(self.run_one(name) for name in StreamName):
            pass
        assert not any(self._work.values()), "streams wait for each other"


class LateStreams(ManualStreams):
    """Streams that run a copy at the latest possible time; steps are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def record(self, name: StreamName) -> StreamEvent:
        event = super().record(name)
        if name is StreamName.COMPUTE:
            self.run_until(event)
        return event

    def wait(self, name: StreamName, event: object) -> None:
        assert isinstance(event, StreamEvent)
        super().wait(name, event)
        if name is StreamName.COMPUTE:
            self.waits += 1
            self.run_until(event)


def pairs() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Return pairs of a device block and a host block, in which no block occurs twice."""
    return st.tuples(
        st.permutations(range(BLOCKS)), st.permutations(range(HOST_BLOCKS)), st.integers(1, 3)
    ).map(lambda drawn: list(zip(drawn[0], drawn[1], strict=False))[: drawn[2]])


WORK = st.lists(
    st.tuples(st.just("step"), st.sets(st.integers(0, BLOCKS - 1), min_size=1, max_size=3))
    | st.tuples(st.sampled_from(["to host", "to device"]), pairs()),
    max_size=14,
)


@settings(max_examples=examples(300), deadline=None)
@given(work=WORK, order=st.lists(st.tuples(st.sampled_from(StreamName), st.booleans())))
def test_any_order_of_the_streams_gives_the_contents_of_one_after_the_other(
    work: Sequence[tuple[str, list[tuple[int, int]] | set[int]]],
    order: list[tuple[StreamName, bool]],
) -> None:
    device = torch.arange(BLOCKS, dtype=torch.float64)[:, None]
    host = -1 - torch.arange(HOST_BLOCKS, dtype=torch.float64)[:, None]
    expected_device, expected_host = device.clone(), host.clone()
    streams = ManualStreams()
    copies = BlockCopies(streams, device, host)
    left = deque(order)

    def compute(memory: torch.Tensor, blocks: list[int], at: int) -> None:
        # A step writes what it reads in all of its blocks.
        memory[blocks] = memory[blocks].sum() / 2 + torch.tensor(blocks)[:, None] + 10 * at

    for at, (kind, used) in enumerate(work):
        if isinstance(used, set):
            blocks = sorted(used)
            copies.before_step(blocks)
            streams.add(StreamName.COMPUTE, partial(compute, device, blocks, at))
            compute(expected_device, blocks, at)
        else:
            on_device, on_host = [one for one, _ in used], [one for _, one in used]
            copies.start(
                Copy(
                    rid=0,
                    to_host=kind == "to host",
                    device_blocks=tuple(on_device),
                    host_blocks=tuple(on_host),
                )
            )
            if kind == "to host":
                expected_host[on_host] = expected_device[on_device]
            else:
                expected_device[on_device] = expected_host[on_host]
        while left:
            name, runs_on = left.popleft()
            streams.run_one(name)
            if not runs_on:
                break
    for name, _ in left:
        streams.run_one(name)
    streams.run_all()
    assert torch.equal(device, expected_device)
    assert torch.equal(host, expected_host)


def test_a_step_waits_only_for_the_copies_of_its_blocks() -> None:
    streams = LateStreams()
    device, host = torch.arange(BLOCKS)[:, None], torch.zeros(HOST_BLOCKS, 1, dtype=torch.long)
    copies = BlockCopies(streams, device, host)
    copies.start(Copy(rid=1, to_host=True, device_blocks=(1, 2), host_blocks=(0, 1)))
    copies.start(Copy(rid=2, to_host=True, device_blocks=(3,), host_blocks=(2,)))
    copies.before_step([0, 4])
    assert streams.waits == 0
    assert not host.any()
    copies.before_step([0, 2])
    assert streams.waits == 1
    assert host[:, 0].tolist() == [1, 2, 0, 0]
    copies.before_step([1, 2, 3])
    assert streams.waits == 2
    assert host[:, 0].tolist() == [1, 2, 3, 0]
    copies.before_step(range(BLOCKS))
    assert streams.waits == 2


@pytest.mark.parametrize("poisons", [False, True], ids=["old contents", "NaN in free blocks"])
@pytest.mark.parametrize("depth", [0, 2], ids=["no plan ahead", "two plans ahead"])
def test_outputs_are_those_of_generate_when_each_copy_is_as_late_as_possible(
    tmp_path: Path, depth: int, poisons: bool
) -> None:
    streams = LateStreams()
    bench = ModelBench(
        TinyModel.build(tmp_path, "Llama", "float64"),
        "slo",
        Preemption.SWAP,
        blocks=18,
        block_size=4,
        depth=depth,
        starts_ahead=depth > 0,
        streams=streams,
        poisons=poisons,
    )
    for family in range(16):
        bench.submit(3 * family % 31 + 1, 16, family=family, ignore_eos=True)
    bench.run_dry()
    assert streams.waits > 5, "no step waited for a copy"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs an NVIDIA GPU")
def test_a_gpu_copies_beside_a_step_and_before_the_next_use_of_a_block() -> None:
    gpu = torch.device("cuda")
    size = 1 << 24  # floats of a block, so that a copy takes milliseconds
    device = torch.zeros(BLOCKS, size, device=gpu)
    host = torch.zeros(HOST_BLOCKS, size, pin_memory=True)
    factor = torch.randn(4096, 4096, device=gpu)
    copies = BlockCopies(CudaStreams(gpu), device, host)
    for turn in range(4):
        for block in range(HOST_BLOCKS):
            copies.before_step([block])
            device[block].fill_(10 * turn + block + 1)
        copies.start(
            Copy(rid=1, to_host=True, device_blocks=(0, 1, 2, 3), host_blocks=(3, 2, 1, 0))
        )
        torch.mm(factor, factor)  # a step without these blocks
        copies.before_step([0, 1])
        device[:2].fill_(torch.nan)  # another request gets two of them
        copies.start(Copy(rid=1, to_host=False, device_blocks=(4, 5), host_blocks=(3, 0)))
        copies.before_step([4, 5])
        found = device[4:, :: size // 4].cpu()
        assert (found[0] == 10 * turn + 1).all()
        assert (found[1] == 10 * turn + 4).all()
    torch.cuda.synchronize()
    assert not host.isnan().any()
