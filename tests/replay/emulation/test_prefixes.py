"""Block keys in virtual time are equal exactly if the hashes of the rendered tokens are."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement.blockhash import block_hashes
from goodput_replay.emulation.requests import block_keys
from goodput_replay.plan import PromptKey
from goodput_replay.sending.prompts import token_numbers

PROMPTS = st.lists(
    st.tuples(st.integers(1, 300), st.lists(st.integers(0, 2), max_size=6)), min_size=2, max_size=5
)


@given(rows=PROMPTS, engine=st.sampled_from([8, 16, 24, 64]), trace=st.sampled_from([16, 32, 50]))
def test_blocks_with_equal_prefixes_have_equal_keys(
    rows: list[tuple[int, list[int]]], engine: int, trace: int
) -> None:
    prompts = [
        PromptKey(
            request_id=f"r{number}",
            input_tokens=length,
            hashes=families,
            block_size=trace if families else 0,
        )
        for number, (length, families) in enumerate(rows)
    ]
    keys = [list(block_keys(prompt, engine)) for prompt in prompts]
    rendered = [block_hashes(token_numbers(b"s", p).tolist(), engine) for p in prompts]
    for found, hashes in zip(keys, rendered, strict=True):
        assert len(found) == len(hashes)
        assert len(set(found)) == len(found)
        assert all(0 <= key < 1 << 64 for key in found)
    for (keys_a, real_a), (keys_b, real_b) in combinations(zip(keys, rendered, strict=True), 2):
        for i, (key, real) in enumerate(zip(keys_a, real_a, strict=True)):
            for j, (other_key, other) in enumerate(zip(keys_b, real_b, strict=True)):
                assert (key == other_key) == (real == other), (i, j)
