"""All candidates, spread over the cores of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from goodput_core.errors import ExitCode, InternalError
from goodput_replay.sweep.candidates import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from goodput_replay.sweep.candidates import Candidate, Evaluation, Question

__all__ = ["evaluate_all"]


def evaluate_all(
    question: Question,
    candidates: Sequence[Candidate],
    *,
    jobs: int,
    on_done: Callable[[Evaluation], None],
) -> list[Evaluation]:
    """Evaluate every candidate; the result has their order, whatever ends first.

    Args:
        question: what each is asked.
        candidates: at least one.
        jobs: worker processes; 1: none, it all happens here.
        on_done: told of each one that is done.

    Raises:
        GoodputError: a candidate cannot be evaluated; the others are given up.
        KeyboardInterrupt: all workers have been ended.
    """
    if jobs == 1:
        done = []
        for candidate in candidates:
            done.append(evaluate(question, candidate))
            on_done(done[-1])
        return done
    # Spawned, not forked: a worker holds nothing of this process but what it is sent.
    context = multiprocessing.get_context("spawn")
    # With it starts a process of the library's own, which looks after SIGINT itself.
    with _held_back(signal.SIGHUP):
        pool = ProcessPoolExecutor(
            max_workers=min(jobs, len(candidates)), mp_context=context, initializer=_watch_parent
        )
    try:
        with _held_back(signal.SIGINT, signal.SIGHUP):
            futures = [pool.submit(evaluate, question, candidate) for candidate in candidates]
        _follow(futures, on_done)
        return [future.result() for future in futures]
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow(futures: list[Future[Evaluation]], on_done: Callable[[Evaluation], None]) -> None:
    left = set(futures)
    while left:
        ended, left = wait(left, return_when=FIRST_COMPLETED)
        for future in ended:
            error = future.exception()
            if isinstance(error, OSError | RuntimeError):
                raise InternalError(f"a worker process ended: {error}") from error
            on_done(future.result())


@contextmanager
def _held_back(*signals: int) -> Iterator[None]:
    """Processes that are started meanwhile never get these signals, this one gets them later.

    Ctrl-C and a hang-up reach the whole terminal; the parent decides what they mean.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()


def _end_with_parent() -> None:
    # A worker waits for work on a pipe whose other end it holds, too: it would wait for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(ExitCode.INTERRUPTED)
