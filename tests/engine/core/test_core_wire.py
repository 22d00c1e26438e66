"""Frames survive every split and merge of the bytes that carry them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.engine_state import EngineState
from goodput_core.slo.targets import Targets
from goodput_engine.core.wire import MAX_FRAME_BYTES, WireError, core_reader, encode, front_reader
from goodput_engine.messages import (
    Cancel,
    Configure,
    Drain,
    EndProcess,
    ExecutorInput,
    Failed,
    FrontMessage,
    Limits,
    RequestOutput,
    SamplingOptions,
    SetLimits,
    StepOutputs,
    Submit,
)
from goodput_engine.scheduler.plan import TokenLogprobs

_MESSAGES: list[FrontMessage] = [
    Configure(
        device="unit",
        policy="sarathi",
        preemption="recompute",
        token_budget=2048,
        min_token_budget=256,
        max_token_budget=8192,
        max_num_seqs=256,
        max_waiting=1024,
    ),
    Submit(
        rid=1,
        arrival_ns=2**62,
        input_tokens=33,
        block_hashes=[2**64 - 1, 0],
        targets=Targets(ttft_ns=5, e2e_ns=7),
        executor=ExecutorInput(output_tokens=7, token_ids=[1, 2, 3]),
    ),
    Cancel(rid=1),
    SetLimits(revision=3, limits=Limits(token_budget=512)),
    Drain(),
    EndProcess(),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_messages_survive_any_split_of_the_stream(sizes: list[int]) -> None:
    stream = b"".join(encode(message) for message in _MESSAGES)
    reader = front_reader()
    got: list[FrontMessage] = []
    at = 0
    for size in sizes:
        got += reader.feed(stream[at : at + size])
        at += size
    got += reader.feed(stream[at:])
    assert got == _MESSAGES


def test_a_frame_that_announces_too_much_is_rejected_before_it_is_read() -> None:
    with pytest.raises(WireError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        front_reader().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x91\xa7Unknown", b"", b"\x92\xa6Cancel\xa3one"], ids=repr
)
def test_bytes_that_are_no_message_are_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError, match="is not a message"):
        front_reader().feed(struct.pack("<I", len(body)) + body)


def test_the_core_cannot_be_mistaken_for_the_front() -> None:
    with pytest.raises(WireError):
        front_reader().feed(encode(Failed(detail="x", exit_code=70)))
    (message,) = core_reader().feed(encode(Failed(detail="x", exit_code=70)))
    assert message == Failed(detail="x", exit_code=70)


def test_the_state_of_the_engine_survives_a_frame() -> None:
    state = EngineState(at_ns=7, running=1, preemptions=2, prompt_reason="Ceiling", draining=True)
    step = StepOutputs(
        at_ns=7, step_ns=3, outputs=[RequestOutput(rid=1, new_tokens=1)], state=state
    )
    assert core_reader().feed(encode(step)) == [step]


def test_sampling_options_and_log_probabilities_survive_a_frame() -> None:
    sampling = SamplingOptions(temperature=0.5, logit_bias={7: -100.0}, stop_ids=[3], logprobs=2)
    submit = Submit(
        rid=1,
        arrival_ns=5,
        input_tokens=2,
        block_hashes=[],
        executor=ExecutorInput(token_ids=[4, 5], sampling=sampling),
    )
    assert front_reader().feed(encode(submit)) == [submit]
    token = TokenLogprobs(-0.5, [4, 7], [-0.5, -3.0])
    output = RequestOutput(rid=1, new_tokens=1, token_ids=[4], logprobs=[token])
    message = StepOutputs(at_ns=7, step_ns=3, outputs=[output], state=EngineState(at_ns=7))
    assert core_reader().feed(encode(message)) == [message]
