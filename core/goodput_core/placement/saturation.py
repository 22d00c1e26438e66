"""When a replica should get no more requests: said once, for engines, routers and virtual time."""

from __future__ import annotations

__all__ = ["is_saturated"]


def is_saturated(
    *,
    running: int,
    max_num_seqs: int,
    waiting: int,
    max_waiting: int,
    kv_used_blocks: int,
    kv_total_blocks: int,
) -> bool:
    """Whether one more request would be refused, or find half a queue before a full memory.

    A full KV cache alone is how a busy replica looks, and a long queue alone may empty with the
    next step. Together they mean that whoever comes now waits for others to finish: the queue
    moves no faster than running requests end.

    Args:
        running: requests that run.
        max_num_seqs: how many may.
        waiting: requests that wait.
        max_waiting: how many may; with 0 only a free place to run takes one more.
        kv_used_blocks: blocks of the KV cache in use, reusable ones not counted. Nineteen
            twentieths of all are full: what is left goes to the next tokens of what runs.
        kv_total_blocks: all of its blocks; 0 when unknown.
    """
    if not max_waiting:
        return running >= max_num_seqs
    if waiting >= max_waiting:
        return True
    full = 0 < 19 * kv_total_blocks <= 20 * kv_used_blocks
    return full and 2 * waiting >= max_waiting
