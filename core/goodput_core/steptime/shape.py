"""What a step computes, in the few sums that every law of step time reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StepShape"]


class StepShape(NamedTuple):
    """What a step computes, summed over its requests.

    A request either decodes, one token on top of a known context, or has a *chunk*: some tokens
    of its prompt (or, after a preemption, of what it must compute again).

    Args:
        num_requests: requests with at least one token in the step, B.
        num_tokens: tokens computed, prompt chunks and decodes together, N.
        context_tokens: context read by every request of the step, prefills included: for each,
            the tokens already in the KV cache plus those computed now.
        max_chunk_tokens: the largest number of tokens of any one request.
        num_decodes: of the requests, those that decode.
        decode_context_tokens: of the context, theirs.
        prefill_squares: for each chunk, end² − start²: twice the pairs of tokens that attend.
            Over the chunks of a prompt it adds up to the square of the prompt's length.
    """

    num_requests: int
    num_tokens: int
    context_tokens: int
    max_chunk_tokens: int
    num_decodes: int
    decode_context_tokens: int
    prefill_squares: int

    @classmethod
    def of(
        cls,
        *,
        decodes: int = 0,
        decode_context_tokens: int = 0,
        chunks: Iterable[tuple[int, int]] = (),
    ) -> StepShape:
        """The shape of a step, from its parts.

        Args:
            decodes: requests that decode.
            decode_context_tokens: context of all of them, with the tokens computed now.
            chunks: of every other request, (tokens computed before, tokens computed now).
        """
        context, longest = decode_context_tokens, 1 if decodes else 0
        shape = cls(decodes, decodes, context, longest, decodes, context, 0)
        for start, tokens in chunks:
            shape = shape.with_chunk(start, tokens)
        return shape

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed in chunks."""
        return self.num_tokens - self.num_decodes

    def with_chunk(self, start: int, tokens: int) -> StepShape:
        """The same step with one more request, of which `tokens` after the first `start`."""
        end = start + tokens
        return StepShape(
            num_requests=self.num_requests + 1,
            num_tokens=self.num_tokens + tokens,
            context_tokens=self.context_tokens + end,
            max_chunk_tokens=max(self.max_chunk_tokens, tokens),
            num_decodes=self.num_decodes,
            decode_context_tokens=self.decode_context_tokens,
            prefill_squares=self.prefill_squares + end * end - start * start,
        )
