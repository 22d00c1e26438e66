"""The buffer for a server that reads slowly is bounded and loses nothing."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from goodput_core.engine_state import EngineState
from goodput_engine.core.wire import Outbox, core_reader
from goodput_engine.messages import Rejected, RequestOutput, StepOutputs
from goodput_engine.scheduler.plan import TokenLogprobs

if TYPE_CHECKING:
    from goodput_engine.messages import CoreMessage


def _step(number: int, *outputs: RequestOutput) -> StepOutputs:
    state = EngineState(
        at_ns=number, running=1, kv_total_blocks=1, kv_free_blocks=1, block_size=16, steps=number
    )
    return StepOutputs(at_ns=number, step_ns=1, outputs=list(outputs), state=state)


def _drain(outbox: Outbox, sender: socket.socket, receiver: socket.socket) -> list[CoreMessage]:
    reader, messages = core_reader(), []
    while outbox.waiting:
        outbox.flush(sender)
        messages += reader.feed(receiver.recv(1 << 20))
    return messages


def _pair() -> tuple[socket.socket, socket.socket]:
    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    return sender, receiver


def test_what_the_socket_takes_goes_out_as_it_is() -> None:
    sender, receiver = _pair()
    with sender, receiver:
        outbox = Outbox()
        steps = [_step(n, RequestOutput(rid=1, new_tokens=1)) for n in range(3)]
        for step in steps:
            outbox.push(step)
        assert _drain(outbox, sender, receiver) == steps
        assert not outbox.waiting


def test_steps_that_cannot_go_out_are_merged_and_no_token_is_lost() -> None:
    sender, receiver = _pair()
    with sender, receiver:
        outbox = Outbox(merge_above_bytes=0)
        first = RequestOutput(rid=1, new_tokens=1, cached_tokens=16, first_scheduled_ns=9)
        outbox.push(_step(0))
        outbox.push(_step(1, first, RequestOutput(rid=2, new_tokens=1, token_ids=[5])))
        for number in range(2, 1000):
            outbox.push(_step(number, RequestOutput(rid=1, new_tokens=1)))
        last = RequestOutput(rid=1, new_tokens=1, finish_reason="stop")
        outbox.push(_step(1000, last, RequestOutput(rid=2, new_tokens=1, token_ids=[6])))
        assert len(outbox._unsent) < 1000
        before, merged = _drain(outbox, sender, receiver)
        assert before == _step(0)
        assert merged == _step(
            1000,
            RequestOutput(
                rid=1,
                new_tokens=1000,
                finish_reason="stop",
                cached_tokens=16,
                first_scheduled_ns=9,
            ),
            RequestOutput(rid=2, new_tokens=2, token_ids=[5, 6]),
        )


def test_a_rejection_never_overtakes_earlier_messages() -> None:
    sender, receiver = _pair()
    with sender, receiver:
        outbox = Outbox(merge_above_bytes=0)
        rejected = Rejected(rid=3, reason="queue_full", detail="later", retry_after_s=1)
        messages: list[CoreMessage] = [_step(0), _step(1), rejected, _step(2)]
        for message in messages:
            outbox.push(message)
        assert _drain(outbox, sender, receiver) == messages


def test_log_probabilities_of_steps_that_cannot_go_out_fill_several_frames() -> None:
    """A server that stands still for a while must not end the core: a frame has a largest size."""
    sender, receiver = _pair()
    with sender, receiver:
        outbox = Outbox(merge_above_bytes=0)
        top = TokenLogprobs(-1.25, list(range(40_000, 41_000)), [-1.5] * 1000)
        requests = range(1, 65)
        for number in range(100):
            outputs = [
                RequestOutput(rid=rid, new_tokens=1, token_ids=[number], logprobs=[top])
                for rid in requests
            ]
            outbox.push(_step(number, *outputs))
        seen = dict[int, list[int]]()
        for message in _drain(outbox, sender, receiver):
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                seen.setdefault(output.rid, []).extend(output.token_ids)
                assert output.logprobs == [top] * output.new_tokens
        assert seen == {rid: list(range(100)) for rid in requests}
