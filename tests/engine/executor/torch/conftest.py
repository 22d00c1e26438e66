"""Fixtures of the tests with real models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread; two threads beside another process are many times slower."""
    import torch

    torch.set_num_threads(1)
