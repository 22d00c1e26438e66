"""The memory that a model may take is measured, and weights that exceed it are refused."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

import torch
from tests.builders.torch_models import make_folder

from goodput_core.errors import InputError
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.memory import PeakMemory, available_bytes

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

KIB, MIB = 1024, 1 << 20


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write files below a root folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8192 kB\nBuffers: 1 kB\n"
V2 = {
    "proc/self/cgroup": "0::/pod/main\n",
    "sys/fs/cgroup/pod/main/memory.max": "max\n",
    "sys/fs/cgroup/pod/main/memory.current": "1\n",
    "sys/fs/cgroup/pod/main/memory.stat": "inactive_file 0\n",
}
PARENT = {
    "sys/fs/cgroup/pod/memory.max": f"{4 * MIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{3 * MIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 7\ninactive_file {MIB}\n",
}
V1 = {
    "proc/self/cgroup": "4:cpu,memory:/outside/of/the/container\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * MIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{MIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {KIB}\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 8 * MIB, id="no control groups"),
        pytest.param(V2, 8 * MIB, id="a group without a limit"),
        pytest.param({**V2, **PARENT}, 2 * MIB, id="the limit of a parent"),
        pytest.param(V1, MIB + KIB, id="version 1 inside a container"),
        pytest.param(
            {**V2, **PARENT, "sys/fs/cgroup/pod/memory.current": f"{9 * MIB}"}, 0, id="exhausted"
        ),
    ],
)
def test_available_memory_is_the_least_of_machine_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    root = write_files(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_bytes(root) == expected


def test_a_system_that_does_not_report_its_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="memory cannot be measured on this system"):
        available_bytes(tmp_path)


def test_peak_memory_sees_a_buffer_that_is_already_freed() -> None:
    peak = PeakMemory(torch.device("cpu"))
    buffer = bytearray(b"x") * (64 * MIB)
    assert len(buffer) == 64 * MIB
    del buffer
    assert 60 * MIB < peak.grown_bytes() < 200 * MIB


def test_a_model_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Llama")
    rows = 1 << 36
    header = json.dumps({"x": {"dtype": "F16", "shape": [rows, 4], "data_offsets": [0, rows * 8]}})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + rows * 8)  # sparse: takes no space
    with pytest.raises(InputError, match=r"the weights take 1024\.0 GiB as float32, but only"):
        load_model(folder)
