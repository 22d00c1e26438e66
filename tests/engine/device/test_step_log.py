"""The step log: the rows that an engine writes, and files that are rejected."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from goodput_core.errors import InputError, UsageError
from goodput_core.files import partial_path
from goodput_core.steptime import StepShape
from goodput_core.steptime.fitting import StepSample
from goodput_engine.device.step_log import STEP_COLUMNS, StepLog, read_step_log
from goodput_engine.scheduler.plan import Copy, StepOutcome, StepPlan, StepResult

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import RunEngine, StartEngine


def outcome(number: int, shape: StepShape, *, copies: tuple[Copy, ...] = ()) -> StepOutcome:
    plan = StepPlan(
        plan_id=number,
        at_ns=0,
        left=(),
        admitted=(),
        copies=copies,
        joined=(),
        new_blocks=(),
        decode_epoch=1,
        num_decodes=shape.num_decodes,
        chunks=(),
        shape=shape,
    )
    result = StepResult(plan_id=number, at_ns=number * 10, step_ns=number, stopped={})
    return StepOutcome(plan=plan, result=result, advanced=[], progress=[], released=[])


def shape_of(number: int) -> StepShape:
    return StepShape.of(decodes=number, decode_context_tokens=number * 7, chunks=[(number, 3)])


@pytest.mark.parametrize("count", [1, 1024, 5000], ids=["one", "one write", "several writes"])
def test_a_log_holds_every_step_in_order(count: int, tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    log = StepLog(path)
    for number in range(1, count + 1):
        log.add(outcome(number, shape_of(number)))
    assert [*tmp_path.iterdir()] == [partial_path(path, private=True)], "renamed when complete"
    log.close()
    expected = [StepSample(shape_of(number), number) for number in range(1, count + 1)]
    assert read_step_log(path) == expected
    assert pq.read_table(path)["at_ns"].to_pylist()[-1] == count * 10
    assert [*tmp_path.iterdir()] == [path]


def test_a_step_that_copied_blocks_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    copy = Copy(rid=1, to_host=True, device_blocks=(1,), host_blocks=(2,))
    log = StepLog(path)
    log.add(outcome(1, shape_of(1)))
    log.add(outcome(2, shape_of(2), copies=(copy,)))
    log.close()
    assert read_step_log(path) == [StepSample(shape_of(1), 1)]


def test_a_log_without_a_step_leaves_no_file(tmp_path: Path) -> None:
    StepLog(tmp_path / "steps.parquet").close()
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def write_batch(self, batch: object) -> None:
            raise OSError(28, "No space left on device")

    log = StepLog(tmp_path / "steps.parquet")
    log._writer.close()
    log._writer = FullDisk()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 20_000):
            log.add(outcome(number, shape_of(1)))
        log.close()
    assert [*tmp_path.iterdir()] == []
    (record,) = caplog.records
    assert record.getMessage() == "step log ended"
    assert "No space left on device" in vars(record)["error"]


def test_a_full_log_gets_its_name_and_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    log = StepLog(path, max_steps=3000)
    for number in range(1, 5001):
        log.add(outcome(number, shape_of(1)))
    assert len(read_step_log(path)) == 3000
    log.close()
    assert [*tmp_path.iterdir()] == [path]


def test_a_log_that_cannot_be_begun_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    path.touch()
    with pytest.raises(InputError, match="exists; name another file"):
        StepLog(path)
    with pytest.raises(InputError, match="cannot be written"):
        StepLog(tmp_path / "none" / "steps.parquet")


def test_without_pyarrow_the_package_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (StepLog, read_step_log):
        with pytest.raises(UsageError, match=r"'pyarrow'; run pip install '\.\[replay\]'"):
            use(tmp_path / "steps.parquet")


def table(**changes: Any) -> pa.Table:
    """Two steps, or other columns; None for a missing column."""
    columns: dict[str, Any] = {name: [1, 2] for name in STEP_COLUMNS}
    columns |= changes
    return pa.table({name: values for name, values in columns.items() if values is not None})


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        pytest.param(table(step_ns=None), "has no column step_ns of type int64", id="no time"),
        pytest.param(table(num_tokens=["1", "2"]), "no column num_tokens of type int64", id="text"),
        pytest.param(table(num_tokens=[1.5, 2.0]), "num_tokens of type int64", id="fractions"),
        pytest.param(
            table(num_tokens=[1, None]), "num_tokens: every step must have a value", id="null"
        ),
        pytest.param(table(num_tokens=[1, -1]), "num_tokens: .* at least 0", id="negative"),
        pytest.param(table(step_ns=[1, 0]), "step_ns: .* at least 1", id="no time at all"),
        pytest.param(table().slice(0, 0), "has 0 steps", id="empty"),
    ],
)
def test_a_table_that_is_no_step_log_is_rejected(
    written: pa.Table, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "steps.parquet"
    pq.write_table(written, path)
    with pytest.raises(InputError, match=problem) as caught:
        read_step_log(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_no_parquet_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    path.write_bytes(b"PAR1 not really")
    for wrong in (path, tmp_path / "none.parquet", tmp_path):
        with pytest.raises(InputError, match="cannot be read as Parquet") as caught:
            read_step_log(wrong)
        assert "\n" not in str(caught.value)


async def test_an_engine_writes_its_steps_until_it_is_stopped(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    path = tmp_path / "steps.parquet"
    engine = start_engine("--step-log", str(path))
    body = {"model": "chat", "prompt": "w " * 100, "max_tokens": 10, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{engine.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
    engine.signal(15)
    assert engine.wait() == 0
    steps = read_step_log(path)
    assert [step.shape for step in steps] == [
        StepShape.of(chunks=[(0, 100)]),
        *(StepShape.of(decodes=1, decode_context_tokens=101 + i) for i in range(9)),
    ]
    assert {step.step_ns for step in steps} == {1_000_000}


def test_an_engine_rejects_a_step_log_that_exists(run_engine: RunEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    path.touch()
    ended = run_engine("--step-log", str(path))
    assert ended.returncode == 64
    assert f"--step-log: {path} exists" in ended.stderr
