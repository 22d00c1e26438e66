"""An executor that computes a real model with torch.

A step runs when its result is collected, in the thread of the caller. The engine core therefore
sends the tokens of a step before the next step starts, and reads its messages between two steps.
With `starts_ahead`, the plan that is queued behind it is started before its tokens are read. A GPU
then never waits for the host: the sampled ids reach the next step on the device.

The executor has the token ids: a plan states how many tokens of a request to compute, and the
executor knows them, because it sampled them or received them with the prompt. A plan that was made
before the result of an earlier plan finds the sampled tokens when it runs.

A step that needs more memory than there is runs again in two halves, or whole if it was started
before the end of the last one. The rows of a step do not see each other, and a row continues from
the keys and values in the pool, so the tokens are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from goodput_engine.executor.torch.chosen_tokens import ChosenTokens
from goodput_engine.executor.torch.downloads import downloads_of
from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.memory import is_out_of_memory
from goodput_engine.executor.torch.model import LateTokens, PackedRow
from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler
from goodput_engine.messages import ExecutorInput, SamplingOptions
from goodput_engine.scheduler.plan import RequestFailure, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from goodput_engine.executor.torch.block_copies import CopyStreams
    from goodput_engine.executor.torch.chosen_tokens import SampledToken
    from goodput_engine.executor.torch.downloads import Downloads

    # Its package may be missing.
    from goodput_engine.executor.torch.grammar import Grammars, OutputGrammar  # noqa: TC004
    from goodput_engine.executor.torch.model import PackedModel
    from goodput_engine.executor.torch.padded_decodes import PaddedDecodes
    from goodput_engine.messages import Submit
    from goodput_engine.scheduler.plan import StepPlan

__all__ = ["TorchExecutor"]

_GREEDY: Final = SamplingOptions()
_Work = list[tuple[int, PackedRow]]
"""Tokens to compute, each with the number of its request."""


@dataclass(slots=True, kw_only=True)
class _TokenSequence:
    """The tokens of a request.

    Args:
        token_ids: prompt and output.
        input_tokens: number of prompt tokens.
        options: end of the output.
        stop_ids: ids of the tokens that end the output.
        sampling: choice of the tokens; None for the most probable one.
        grammar: grammar of the output; None for a free output.
        blocks: block table; empty before the first admission.
        ended: True after the last token. A plan that was made before may still compute the request.
        failed: True if the request could not be computed. Later plans skip it.
    """

    token_ids: list[int]
    input_tokens: int
    options: ExecutorInput
    stop_ids: frozenset[int]
    sampling: RequestSampling | None
    grammar: OutputGrammar | None
    blocks: list[int] = field(default_factory=list)
    ended: bool = False
    failed: bool = False

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.token_ids) - self.input_tokens

    def banned_ids(self, unread: int = 0) -> frozenset[int]:
        """Return the ids of the tokens that would end the output too early.

        Args:
            unread: output tokens that only the device has.
        """
        options = self.options
        if options.output_tokens is not None or self.output_tokens + unread >= options.min_tokens:
            return frozenset()
        return self.stop_ids

    def append(self, token_id: int) -> bool:
        """Append a sampled token; return True if the output ends with it."""
        self.token_ids.append(token_id)
        if self.sampling is not None:
            self.sampling.append(token_id)
        if self.ended:
            return False
        limit = self.options.output_tokens
        self.ended = token_id in self.stop_ids if limit is None else self.output_tokens >= limit
        if self.grammar is not None and self.grammar.append(token_id):
            self.ended = True
        return self.ended

    def restrict(self, words: np.ndarray) -> SampledRow:
        """Return the row of logits of an output with a grammar.

        Args:
            words: bits of the tokens that the grammar permits; changed in place.
        """
        assert self.grammar is not None
        options, banned = self.options, self.banned_ids()
        may_stop = not (options.ignore_eos or banned or options.output_tokens is not None)
        self.grammar.restrict(words, banned, may_stop=may_stop)
        return SampledRow(self.sampling, len(self.token_ids), allowed=words)


@dataclass(slots=True, kw_only=True)
class _StartedStep:
    """A step whose tokens are not read yet.

    Args:
        start_ns: time at which the host began with it.
        work: tokens to compute.
        ahead: True if it was started before the tokens of the last step were read.
        rids: requests that sample, in the order of `chosen`.
        chosen: their tokens; None if the step must be computed when it is finished.
    """

    start_ns: int
    work: _Work
    ahead: bool = False
    rids: list[int] = field(default_factory=list)
    chosen: ChosenTokens | None = None


class TorchExecutor:
    """Runs plans on a model.

    Args:
        model: the model.
        num_blocks: number of KV blocks of the scheduler's pool.
        block_size: tokens per block.
        num_host_blocks: number of host blocks of the scheduler's pool.
        grammars: compiles the grammars of outputs; None if no request has one.
        clock: returns monotonic nanoseconds.
        streams: streams of copies; None for those of the device.
        downloads: copies of the sampled tokens to the host; None for those of the device.
        starts_ahead: True to start a queued plan before the tokens of the running one are read. On
            a CPU, which computes at once, their tokens would only be sent later.

    Attributes:
        default_depth: 1 for `starts_ahead`; otherwise a plan would only delay new requests.
        pool: the contents of the blocks, and of one more block for the rows of padded steps.
        padded: computes steps that only decode; None to compute them like the others.
    """

    behind_ns = 0
    computes_in_collect = True

    def __init__(
        self,
        model: PackedModel,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
        clock: Callable[[], int],
        streams: CopyStreams | None = None,
        downloads: Downloads | None = None,
        starts_ahead: bool = False,
    ) -> None:
        self.pool = KVPool(
            model.geometry,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            device=model.device,
            streams=streams,
        )
        self._model = model
        self._clock = clock
        self._sampler = Sampler(downloads or downloads_of(model.device))
        self._grammars = grammars
        self._sequences: dict[int, _TokenSequence] = {}
        self._members: dict[int, None] = {}
        self._plans: deque[tuple[StepPlan, int]] = deque()
        self.padded: PaddedDecodes | None = None
        self.default_depth = int(starts_ahead)
        self._starts_ahead = starts_ahead
        self._started: _StartedStep | None = None
        self._ended_ns = 0

    def add(self, submit: Submit) -> None:
        """Add a request with the token ids of its prompt."""
        options = submit.executor
        token_ids, sampling = options.token_ids, options.sampling
        assert len(token_ids) == submit.input_tokens, "the token ids of the prompt are missing"
        model_stop_ids = frozenset() if options.ignore_eos else self._model.stop_ids
        self._sequences[submit.rid] = _TokenSequence(
            token_ids=list(token_ids),
            input_tokens=len(token_ids),
            options=options,
            stop_ids=model_stop_ids.union(sampling.stop_ids),
            sampling=None if sampling == _GREEDY else RequestSampling(sampling, token_ids),
            grammar=self._start_grammar(options.grammar),
        )

    def _start_grammar(self, grammar: str) -> OutputGrammar | None:
        if not grammar:
            return None
        assert self._grammars is not None, "the HTTP process rejects grammars without a tokenizer"
        return self._grammars.start(grammar)

    def forget(self, rids: Iterable[int]) -> None:
        """Remove requests that no later plan computes."""
        for rid in rids:
            self._sequences.pop(rid, None)

    def submit(self, plan: StepPlan, ready_ns: int) -> None:
        """Queue a plan behind the plans that were submitted earlier."""
        self._plans.append((plan, ready_ns))

    def next_event_ns(self) -> int | None:
        """Return the time from which the oldest plan may end; None if no plan is in flight."""
        # Not before the last one ended, even if the plan was made earlier.
        return max(self._plans[0][1], self._ended_ns) if self._plans else None

    def collect(self, now_ns: int) -> StepResult | None:
        """Run the oldest plan and return its result; None if there is none, or before its time."""
        if not self._plans or self._plans[0][1] > now_ns:
            return None
        plan, _ = self._plans.popleft()
        started, self._started = self._started or self._start(plan, None), None
        if self._starts_ahead and self._plans and started.chosen is not None:
            following, _ = self._plans[0]
            if self._can_follow(started):
                self._started = self._start(following, started)
        failed: dict[int, RequestFailure] = {}
        sampled = self._finish(started, failed)
        stopped = {
            rid: "stop"
            for rid, token in sampled.items()
            if self._sequences[rid].append(token.token_id)
        }
        end_ns = self._clock()
        start_ns, self._ended_ns = max(started.start_ns, self._ended_ns), end_ns
        return StepResult(
            plan_id=plan.plan_id,
            at_ns=end_ns,
            step_ns=end_ns - start_ns,
            stopped=stopped,
            token_ids={rid: token.token_id for rid, token in sampled.items()},
            logprobs={
                rid: token.logprobs for rid, token in sampled.items() if token.logprobs is not None
            },
            failed=failed,
        )

    def _start(self, plan: StepPlan, before: _StartedStep | None) -> _StartedStep:
        """Start a step, whose tokens stay on the device.

        Args:
            plan: its plan.
            before: the step before if its tokens are not read yet.
        """
        start_ns = self._clock()
        self._apply(plan)
        unread = {} if before is None else {rid: at for at, rid in enumerate(before.rids)}
        work, late_rows = self._work(plan, unread)
        started = _StartedStep(start_ns=start_ns, work=work, ahead=before is not None)
        if not work:
            return started
        late = None
        if late_rows:
            assert before is not None
            assert before.chosen is not None
            late = LateTokens(
                late_rows, [unread[work[row][0]] for row in late_rows], before.chosen.ids
            )
        try:
            started.chosen = self._choose(work, late, unread)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            started.rids = [rid for rid, row in work if row.samples]
        return started

    def _choose(
        self, work: _Work, late: LateTokens | None, unread: Mapping[int, int]
    ) -> ChosenTokens:
        """Compute tokens, and choose the next token of each row that samples."""
        rows = [row for _, row in work]
        self.pool.before_step(row.blocks for row in rows)
        if self.padded is not None and self.padded.takes(rows):
            logits = self.padded.compute(rows, late)
        elif late is None:
            logits = self._model.compute(rows, self.pool)
        else:
            logits = self._model.compute(rows, self.pool, late)
        sampling = [rid for rid, row in work if row.samples]
        return self._sampler.choose(logits, self._sampled_rows(sampling, unread))

    def _can_follow(self, started: _StartedStep) -> bool:
        """True if no unread token changes the logits of the next step."""
        return all(self._sequences[rid].grammar is None for rid in started.rids)

    def _finish(
        self, started: _StartedStep, failed: dict[int, RequestFailure]
    ) -> dict[int, SampledToken]:
        """Return the tokens of a step; for the other argument, see `_compute_parts`."""
        if started.chosen is not None:
            return self._read(started.rids, started.chosen, failed)
        work = [(rid, self._with_last_token(rid, row)) for rid, row in started.work]
        if started.ahead:
            # Whole again: the last step, which has ended now, took a part of the memory.
            return self._compute(work, failed)
        return self._compute_parts(work, failed) if work else {}

    def _read(
        self, rids: list[int], chosen: ChosenTokens, failed: dict[int, RequestFailure]
    ) -> dict[int, SampledToken]:
        """Return the tokens of requests, without those that `failed` gets or that failed before."""
        sampled = dict(zip(rids, chosen.read(), strict=True))
        for rid in rids:
            sequence = self._sequences[rid]
            if sequence.failed:  # in an earlier step, whose tokens were read after this one began
                del sampled[rid]
                continue
            failure = None if sequence.ended else _failure(sequence, sampled[rid])
            if failure is not None:
                sequence.failed = True
                failed[rid] = failure
                del sampled[rid]
        return sampled

    def _with_last_token(self, rid: int, row: PackedRow) -> PackedRow:
        """Return a row with its last token, which was unread when the step was started."""
        end = row.start + len(row.token_ids)
        return row._replace(token_ids=self._sequences[rid].token_ids[row.start : end])

    def _apply(self, plan: StepPlan) -> None:
        """Update the block tables and the decode batch, and copy blocks."""
        members, sequences = self._members, self._sequences
        for rid in plan.left:
            del members[rid]
        for admitted in plan.admitted:
            sequences[admitted.rid].blocks = list(admitted.blocks)
        for copy in plan.copies:
            self.pool.copy(copy)
        for join in plan.joined:
            members[join.rid] = None
        for rid, block in plan.new_blocks:
            sequences[rid].blocks.append(block)

    def _work(self, plan: StepPlan, unread: Mapping[int, int]) -> tuple[_Work, list[int]]:
        """Return the tokens that a plan computes, and the rows whose last token is unread.

        Requests that failed are left out.

        Args:
            plan: the plan.
            unread: requests that have a token which only the device has.
        """
        work: _Work = []
        late: list[int] = []
        if plan.num_decodes:
            assert plan.num_decodes == len(self._members)
            for rid in self._members:
                sequence = self._sequences[rid]
                if sequence.failed:
                    continue
                token_ids = sequence.token_ids
                last, start = token_ids[-1:], len(token_ids) - 1
                if rid in unread:
                    late.append(len(work))
                    last, start = [0], len(token_ids)
                work.append((rid, PackedRow(last, start, sequence.blocks, True)))
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.rid]
            if sequence.failed:
                continue
            end, known = chunk.start + chunk.num_tokens, len(sequence.token_ids)
            is_complete = end == known + (chunk.rid in unread)
            assert not chunk.samples or is_complete, "a token is missing"
            token_ids = sequence.token_ids[chunk.start : end]
            if end > known:
                late.append(len(work))
                token_ids.append(0)
            row = PackedRow(token_ids, chunk.start, sequence.blocks, chunk.samples)
            work.append((chunk.rid, row))
        return work, late

    def _compute_parts(
        self, work: _Work, failed: dict[int, RequestFailure]
    ) -> dict[int, SampledToken]:
        """Compute the parts of a step for which the memory is too small, one after the other.

        Args:
            work: the tokens.
            failed: gets the requests that cannot continue, among them those for which the memory
                is too small even alone.
        """
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        halves = _halves(work)
        if halves is None:
            rid = work[0][0]
            self._sequences[rid].failed = True
            failed[rid] = RequestFailure(
                "out_of_memory",
                "the device has too little free memory for this request",
                retry_after_s=1,
            )
            return {}
        first, second = halves
        return self._compute(first, failed) | self._compute(second, failed)

    def _sampled_rows(self, rids: list[int], unread: Mapping[int, int]) -> list[SampledRow]:
        """Return the options of the rows that sample, with the masks of their grammars."""
        sequences = [self._sequences[rid] for rid in rids]
        rows = [
            SampledRow(
                one.sampling, len(one.token_ids) + ahead, one.banned_ids(ahead), unread=ahead
            )
            for one, ahead in zip(sequences, (int(rid in unread) for rid in rids), strict=True)
        ]
        # A plan that was made before the end of an output computes surplus tokens.
        restricted = [
            (at, one, one.grammar)
            for at, one in enumerate(sequences)
            if one.grammar is not None and not one.ended
        ]
        if restricted:
            assert self._grammars is not None
            masks = self._grammars.masks([grammar for _, _, grammar in restricted])
            for (at, one, _), words in zip(restricted, masks, strict=True):
                rows[at] = one.restrict(words)
        return rows

    def _compute(self, work: _Work, failed: dict[int, RequestFailure]) -> dict[int, SampledToken]:
        """Compute tokens, and return the next token of each row that samples.

        For the arguments, see `_compute_parts`.
        """
        work = [(rid, row) for rid, row in work if not self._sequences[rid].failed]
        if not work:
            return {}
        try:
            chosen = self._choose(work, None, {})
            return self._read([rid for rid, row in work if row.samples], chosen, failed)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, whose exception holds the tensors of the failed attempt.
        return self._compute_parts(work, failed)


def _failure(sequence: _TokenSequence, token: SampledToken) -> RequestFailure | None:
    """Return the reason why a sampled token cannot be used; None if it can."""
    if not token.is_finite:
        return RequestFailure(
            "not_finite",
            "the model's logits for this request are not finite numbers; check its weights, or "
            "select a data type with a larger range",
        )
    problem = None if sequence.grammar is None else sequence.grammar.problem()
    if problem is None:
        return None
    return RequestFailure("invalid", f"response_format: the output cannot continue: {problem}")


def _halves(work: _Work) -> tuple[_Work, _Work] | None:
    """Divide rows, or the tokens of a single row; None for a single token."""
    if len(work) > 1:
        middle = len(work) // 2
        return work[:middle], work[middle:]
    ((rid, row),) = work
    middle = len(row.token_ids) // 2
    if not middle:
        return None
    first = row._replace(token_ids=row.token_ids[:middle], samples=False)
    second = row._replace(token_ids=row.token_ids[middle:], start=row.start + middle)
    return [(rid, first)], [(rid, second)]
