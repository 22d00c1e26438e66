"""The messages between the HTTP process and the engine core.

They are `msgspec` structs because they cross a process boundary on the hot path: they are encoded
as compact, tagged MessagePack, without pickle. The scheduler never sees the `executor` part of a
`Submit`, so the true length of a replayed request cannot reach a policy.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - msgspec reads the annotations

import msgspec

from goodput_core.engine_state import EngineState  # noqa: TC001 - msgspec reads the annotations
from goodput_core.slo.targets import Targets
from goodput_engine.scheduler.plan import TokenLogprobs  # noqa: TC001 - msgspec reads it
from goodput_engine.weights.source import WeightsSource  # noqa: TC001 - msgspec reads it

__all__ = [
    "Cancel",
    "Configure",
    "CoreMessage",
    "Drain",
    "EndProcess",
    "ExecutorInput",
    "Failed",
    "FollowManifest",
    "FrontMessage",
    "Limits",
    "ModelFolder",
    "Ready",
    "Rejected",
    "RequestOutput",
    "SamplingOptions",
    "SetLimits",
    "StepOutputs",
    "Submit",
    "WarmingUp",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of messages: positional MessagePack, tagged with the class's name."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of the parts of a message."""


class ModelFolder(_Value, frozen=True, kw_only=True):
    """A real model to compute.

    Args:
        path: absolute path of a folder in Hugging Face's format; empty until the weights are
            fetched.
        name: name of the model, for logs and metrics.
        source: weights to fetch before the core starts; None if the folder exists.
        dtype: a name of `goodput_core.spec.choices.DataType`; None for float32 on a CPU and
            bfloat16 on a GPU.
        max_model_tokens: limit of prompt and output tokens together; None for the model's.
        attention: a name of `goodput_core.spec.choices.AttentionKernel`.
        block_size: tokens per KV block.
        kv_blocks: number of KV blocks; None for as many as the memory holds.
        memory_percent: share of the memory that is available after loading that KV blocks and
            swap space may take; None for 50 on a CPU and 90 on a GPU.
        threads: number of threads that compute; None for all cores but one.
        sampling_defaults: a name of `goodput_core.spec.choices.SamplingSource`, for the HTTP
            process.
        allow_pickle_weights: True to load pickled weights if there are no safetensors.
        allow_remote_code: True to execute the code of the model's folder.
    """

    path: str
    name: str = ""
    source: WeightsSource | None = None
    dtype: str | None = None
    max_model_tokens: int | None = None
    attention: str = "auto"
    block_size: int = 16
    kv_blocks: int | None = None
    memory_percent: int | None = None
    threads: int | None = None
    sampling_defaults: str = "model"
    allow_pickle_weights: bool = False
    allow_remote_code: bool = False


class Configure(_Message, frozen=True, kw_only=True):
    """The first message: configure the core. The reply is `Ready` or `Failed`.

    A core that computes a model sends `WarmingUp` before.

    Args:
        device: name of a shipped device profile, or path of a profile's YAML file; not used if a
            model is computed.
        policy: a name of `goodput_core.spec.choices.Policy`.
        preemption: a name of `goodput_core.spec.choices.Preemption`.
        token_budget: initial number of tokens that one step may compute.
        min_token_budget, max_token_budget: bounds of a later budget, which is clamped to them.
        max_num_seqs: initial number of requests that may run concurrently.
        max_waiting: initial number of requests that may wait.
        budget_law: a name of `goodput_core.spec.choices.BudgetLaw`. The law sizes the *prefill
            budget*: the prompt tokens of a step, within the token budget. None if only the token
            budget limits a step.
        batch_timeout_ns: longest wait of an incomplete batch under `static` or `dynamic`; None
            for the policy's default.
        ageing_ns: waiting time that raises a request by one level under `priority`, or makes it
            overdue under `sjf`; None for the policy's default.
        late_requests: a name of `goodput_core.spec.choices.LateRequests`.
        prefill_chunk_tokens: largest number of prompt tokens of one request in a step; None if
            only the token budget limits them.
        swap_space_bytes: host memory for the KV blocks of preempted requests.
        depth: plans queued on the device behind the running one, 0 to 2; None for the executor's
            value.
        step_log: absolute path of the step log; None if none is written.
        model: the model to compute; None to emulate `device`.
    """

    device: str
    policy: str
    preemption: str
    token_budget: int
    min_token_budget: int
    max_token_budget: int
    max_num_seqs: int
    max_waiting: int
    budget_law: str | None = None
    batch_timeout_ns: int | None = None
    ageing_ns: int | None = None
    prefill_chunk_tokens: int | None = None
    late_requests: str = "finish"
    swap_space_bytes: int = 0
    depth: int | None = None
    step_log: str | None = None
    model: ModelFolder | None = None


class FollowManifest(_Message, frozen=True, kw_only=True):
    """New values of the fields of `Configure` that may change while the core runs.

    They are sent when the manifest changes. The current token budget is clamped to the new bounds,
    and `budget_law` replaces the current law.

    Args:
        min_token_budget, max_token_budget, budget_law: see `Configure`.
    """

    min_token_budget: int
    max_token_budget: int
    budget_law: str | None = None


class SamplingOptions(_Value, frozen=True, kw_only=True):
    """Options for choosing the output tokens of a real model; by default, the most probable ones.

    Args:
        temperature: divisor of the logits; 0 for the most probable token.
        top_k: number of the most probable tokens that are kept; 0 for all.
        top_p: probability of the most probable tokens that are kept; 1 for all.
        min_p: probability of a token that is kept, as a share of the largest; 0 for all.
        repetition_penalty: divisor of the positive logits, and factor of the negative ones, of
            tokens in the prompt or the output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: the same, once for each time that a token is in the output.
        seed: requests with equal seeds, options and prompts have equal outputs; from −2**63 to
            2**63 − 1.
        logit_bias: added to the logits of these token ids.
        stop_ids: ids of further tokens that end the output.
        logprobs: number of the most probable tokens whose log-probabilities are returned, besides
            that of the output token; None for no log-probabilities.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    stop_ids: list[int] = []
    logprobs: int | None = None


class ExecutorInput(_Value, frozen=True, kw_only=True):
    """The part of a request that only the executor may see.

    Args:
        output_tokens: the true output length of a replayed request; None if the executor
            determines the length.
        min_tokens: minimum number of output tokens.
        ignore_eos: True to generate up to the limit, ignoring the end-of-sequence token.
        token_ids: token ids of the prompt, for executors that compute; empty on an emulated
            device.
        sampling: choice of the tokens; an emulated device ignores it.
        grammar: grammar of the output, in the form of llguidance; empty for a free output.
    """

    output_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    token_ids: list[int] = []
    sampling: SamplingOptions = SamplingOptions()
    grammar: str = ""


class Submit(_Message, frozen=True, kw_only=True):
    """A new request.

    Args:
        rid: number of the request, never reused within a process.
        arrival_ns: arrival time, on the machine's monotonic clock.
        input_tokens: number of prompt tokens.
        max_output_tokens: the client's limit of output tokens; None for the model's limit.
        block_hashes: hashes of the prompt's full blocks, in order.
        slo_class: name of the request's class.
        targets: SLO targets of the request, already merged from its headers and its class.
        priority: the request's priority; larger is more urgent.
        weight: weight of the request's class; see `ScheduledRequest`.
        executor: input for the executor only.
    """

    rid: int
    arrival_ns: int
    input_tokens: int
    max_output_tokens: int | None = None
    block_hashes: Sequence[int] = ()
    slo_class: str = ""
    targets: Targets = Targets()
    priority: int = 0
    weight: int = 1
    executor: ExecutorInput = ExecutorInput()


class Cancel(_Message, frozen=True, kw_only=True):
    """Cancel a request and free its blocks: the client left, or a stop string matched."""

    rid: int


class Limits(_Value, frozen=True, kw_only=True):
    """Limits that may change between any two steps; None leaves a limit unchanged.

    Args:
        token_budget: number of tokens that one step may compute.
        max_num_seqs: number of requests that may run at once.
        max_waiting: number of requests that may wait.
        budget_law: the law that sizes the prefill budget; see `Configure`.
        safety_percent: share of the tightest TPOT target that a step is planned to take; a lower
            value is more cautious.
    """

    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    budget_law: str | None = None
    safety_percent: int | None = None


class SetLimits(_Message, frozen=True, kw_only=True):
    """New limits, already authorised and with a higher revision than the last ones."""

    revision: int
    limits: Limits


class Drain(_Message, frozen=True, kw_only=True):
    """Reject new requests and finish the accepted ones."""


class EndProcess(_Message, frozen=True, kw_only=True):
    """End the core process now."""


class RequestOutput(_Value, frozen=True, kw_only=True):
    """The result of one step for one request.

    Args:
        rid: the request's number.
        new_tokens: number of tokens that the request gained.
        token_ids: ids of these tokens; empty on an emulated device.
        logprobs: their log-probabilities; empty without this option.
        finish_reason: "stop" or "length" in the last output of the request, else None.
        cached_tokens: prompt tokens taken from the prefix cache; set only in the output with the
            first token.
        first_scheduled_ns: time when the request was first part of a plan; set only in the output
            with the first token.
    """

    rid: int
    new_tokens: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    cached_tokens: int = 0
    first_scheduled_ns: int = 0


class WarmingUp(_Message, frozen=True, kw_only=True):
    """The weights are in memory, and the core computes its first steps.

    Sent before the first step and again after each part of the warm-up, so that the server can
    detect a hung core before `Ready`.

    Args:
        load_ns: time in which the weights were loaded. It shows the speed of the machine before
            any step was measured.
    """

    load_ns: int


class Ready(_Message, frozen=True, kw_only=True):
    """The core is ready. The message has the properties of the device for the HTTP process.

    Args:
        device: name of the device profile, or of the model's folder.
        vocab_size: size of the vocabulary; every token id is smaller.
        max_model_tokens: limit of prompt and output tokens together.
        state: the core's state before its first step, with block size and limits.
        longest_step_ns: estimated time of the longest step, during which the core sends nothing;
            0 if the core sends messages during steps.
        model_facts: facts of a computed model, for the log and `GET /control/state`; empty on an
            emulated device.
        grammar_problem: reason why no output can follow a grammar; empty if outputs can.
    """

    device: str
    vocab_size: int
    max_model_tokens: int
    state: EngineState
    longest_step_ns: int = 0
    model_facts: dict[str, str | int | float] = {}
    grammar_problem: str = ""


class Failed(_Message, frozen=True, kw_only=True):
    """The core cannot start or continue, and its process ends.

    Args:
        detail: one sentence for the user.
        exit_code: a value of `goodput_core.errors.ExitCode`: 64 if the user can correct the
            problem, otherwise 70.
    """

    detail: str
    exit_code: int


class StepOutputs(_Message, frozen=True, kw_only=True):
    """The outputs of one step.

    Also sent without outputs when the state of an idle core changes, and as a heartbeat.

    Args:
        at_ns: time when the step's results were available, on the machine's monotonic clock.
        step_ns: device time of the step; 0 if there was none.
        outputs: one entry for each request that gained tokens or finished.
        state: the core's state after the step.
    """

    at_ns: int
    step_ns: int
    outputs: list[RequestOutput]
    state: EngineState


class Rejected(_Message, frozen=True, kw_only=True):
    """A request that was not admitted, or that was removed afterwards.

    A removed request may already have emitted tokens; no output follows the message.

    Args:
        rid: the request's number.
        reason: "queue_full", "memory_full", "unattainable", "too_long", "draining" or "invalid"
            for a request that was not admitted; "displaced", "late", "out_of_memory" or
            "not_finite" for a removed one, and "invalid" if its grammar permits no further token.
        detail: one sentence for the client.
        retry_after_s: seconds after which to retry; 0 if a retry cannot help.
    """

    rid: int
    reason: str
    detail: str
    retry_after_s: int = 0


FrontMessage = Configure | FollowManifest | Submit | Cancel | SetLimits | Drain | EndProcess
"""A message from the HTTP process to the core."""
CoreMessage = WarmingUp | Ready | Failed | StepOutputs | Rejected
"""A message from the core to the HTTP process."""
