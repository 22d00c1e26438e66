"""An executor that computes a real model with torch.

A step runs when its result is collected, in the thread of the caller. The engine core therefore
sends the tokens of a step before the next step starts, and reads its messages between two steps.

The executor has the token ids: a plan states how many tokens of a request to compute, and the
executor knows them, because it sampled them or received them with the prompt. A plan that was made
before the result of an earlier plan finds the sampled tokens when it runs.

A step that needs more memory than there is runs again in two halves. The rows of a step do not see
each other, and a row continues from the keys and values in the pool, so the tokens are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from goodput_engine.executor.torch.kv_pool import KVPool
from goodput_engine.executor.torch.model import PackedRow
from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler
from goodput_engine.messages import ExecutorInput, SamplingOptions
from goodput_engine.scheduler.plan import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    # Its package may be missing.
    from goodput_engine.executor.torch.grammar import Grammars, OutputGrammar  # noqa: TC004
    from goodput_engine.executor.torch.model import PackedModel
    from goodput_engine.executor.torch.sampling import SampledToken
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

    def banned_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that would end the output too early."""
        options = self.options
        if options.output_tokens is not None or self.output_tokens >= options.min_tokens:
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


class TorchExecutor:
    """Runs plans on a model.

    Args:
        model: the model.
        num_blocks: number of KV blocks of the scheduler's pool.
        block_size: tokens per block.
        num_host_blocks: number of host blocks of the scheduler's pool.
        grammars: compiles the grammars of outputs; None if no request has one.
        clock: returns monotonic nanoseconds.
    """

    behind_ns = 0

    def __init__(
        self,
        model: PackedModel,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
        clock: Callable[[], int],
    ) -> None:
        self.pool = KVPool(
            model.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            device=model.device,
        )
        self._model = model
        self._clock = clock
        self._sampler = Sampler()
        self._grammars = grammars
        self._sequences: dict[int, _TokenSequence] = {}
        self._members: dict[int, None] = {}
        self._plans: deque[tuple[StepPlan, int]] = deque()

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
        """Return the time from which the oldest plan may run; None if no plan is in flight."""
        return self._plans[0][1] if self._plans else None

    def collect(self, now_ns: int) -> StepResult | None:
        """Run the oldest plan and return its result; None if there is none, or before its time."""
        if not self._plans or self._plans[0][1] > now_ns:
            return None
        plan, _ = self._plans.popleft()
        start_ns = self._clock()
        self._apply(plan)
        failed: dict[int, str] = {}
        invalid: dict[int, str] = {}
        sampled = self._compute(self._work(plan), failed, invalid)
        stopped = {
            rid: "stop"
            for rid, token in sampled.items()
            if self._sequences[rid].append(token.token_id)
        }
        end_ns = self._clock()
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
            invalid=invalid,
        )

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

    def _work(self, plan: StepPlan) -> _Work:
        """Return the tokens that a plan computes."""
        work: _Work = []
        if plan.num_decodes:
            assert plan.num_decodes == len(self._members)
            for rid in self._members:
                sequence = self._sequences[rid]
                token_ids = sequence.token_ids
                row = PackedRow(token_ids[-1:], len(token_ids) - 1, sequence.blocks, True)
                work.append((rid, row))
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.rid]
            end = chunk.start + chunk.num_tokens
            is_complete = end == len(sequence.token_ids)
            assert not chunk.samples or is_complete or sequence.failed, "a token is missing"
            token_ids = sequence.token_ids[chunk.start : end]
            row = PackedRow(token_ids, chunk.start, sequence.blocks, chunk.samples)
            work.append((chunk.rid, row))
        return work

    def _compute(
        self, work: _Work, failed: dict[int, str], invalid: dict[int, str]
    ) -> dict[int, SampledToken]:
        """Compute tokens, and return the next token of each row that samples.

        Args:
            work: the tokens.
            failed: gets the requests for which the memory is too small even alone, with the reason.
            invalid: gets the requests whose grammar permits no further token, with the reason.
        """
        work = [(rid, row) for rid, row in work if not self._sequences[rid].failed]
        if not work:
            return {}
        try:
            logits = self._model.compute([row for _, row in work], self.pool)
            sampling = [rid for rid, row in work if row.samples]
            sequences = list(map(self._sequences.__getitem__, sampling))
            tokens = self._sampler.sample(logits, self._sampled_rows(sequences))
            sampled = dict(zip(sampling, tokens, strict=True))
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        else:
            for rid, sequence in zip(sampling, sequences, strict=True):
                grammar = None if sequence.ended else sequence.grammar
                if grammar is not None and (problem := grammar.problem()) is not None:
                    sequence.failed = True
                    invalid[rid] = f"response_format: the output cannot continue: {problem}"
                    del sampled[rid]
            return sampled
        # Outside of the handler, whose exception holds the tensors of the failed attempt.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        halves = _halves(work)
        if halves is None:
            rid = work[0][0]
            self._sequences[rid].failed = True
            failed[rid] = "the device has too little free memory for this request"
            return {}
        first, second = halves
        return self._compute(first, failed, invalid) | self._compute(second, failed, invalid)

    def _sampled_rows(self, sequences: list[_TokenSequence]) -> list[SampledRow]:
        """Return the options of the rows that sample, with the masks of their grammars."""
        rows = [SampledRow(one.sampling, len(one.token_ids), one.banned_ids()) for one in sequences]
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


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation failed; on a CPU, torch has no type of its own for that."""
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)
