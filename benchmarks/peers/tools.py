"""The command line of each load generator, tuned as its documentation advises.

docs/benchmarks.md gives the reason for each option. All tools send the same rows at the same
times to the same server, stream the responses, write a result for each request, and draw no
progress.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from benchmarks.peers.environments import MODEL, Environment

__all__ = ["TOOLS", "Invocation", "Run", "Tool"]

_TORCH: Final = "torch==2.13.0"
_BARE_CLIENT: Final = Path(__file__).parents[1] / "stand_ins" / "bare_client.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The input of one run of a tool.

    Args:
        url: the server.
        trace: the trace in our Parquet format.
        mooncake: the same trace as Mooncake's JSON lines.
        rows: number of requests.
        folder: the working directory of the tool, empty at the start.
        tokenizer: folder of the tokenizer; None if no chosen tool needs one.
        block_size: tokens per hash of the trace.
    """

    url: str
    trace: Path
    mooncake: Path
    rows: int
    folder: Path
    tokenizer: Path | None
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command, and environment variables in addition to the present ones."""

    command: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A load generator.

    Args:
        name: name in options and results.
        title: name in tables.
        invoke: writes the files that a run needs, and returns its command.
        environment: the virtual environment; None for ours.
        page: True if the live page of the run is opened.
        exit_codes: exit codes of a run that is a result.
    """

    name: str
    title: str
    invoke: Callable[[Tool, Run], Invocation]
    environment: Environment | None = None
    page: bool = False
    exit_codes: tuple[int, ...] = (0,)


def _replay(tool: Tool, run: Run) -> Invocation:
    # Without --workers, the output lengths of the trace, which number its rows, would make the
    # replayer expect more work than there is.
    command = [sys.executable, "-m", "goodput_core", "replay", "--trace", str(run.trace)]
    command += ["--target", run.url, "--out", "run", "--length-pinning", "max-tokens", "--json"]
    command += ["--workers", "1"]
    return Invocation(command=[*command, *(["--ui"] if tool.page else [])])


def _bare(_tool: Tool, run: Run) -> Invocation:
    command = [sys.executable, str(_BARE_CLIENT), "--url", run.url]
    return Invocation(command=[*command, "--schedule", str(run.mooncake)])


def _aiperf(tool: Tool, run: Run) -> Invocation:
    command = [_program(tool, "aiperf"), "profile", "--model", "mock", "--url", run.url]
    command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", MODEL]
    command += ["--input-file", str(run.mooncake), "--custom-dataset-type", "mooncake_trace"]
    command += ["--fixed-schedule", "--fixed-schedule-auto-offset", "--use-legacy-max-tokens"]
    command += [
        "--extra-inputs",
        "ignore_eos:true",
        "--use-server-token-count",
        "--ui",
        "none",
        "--no-gpu-telemetry",
    ]
    command += ["--no-server-metrics", "--artifact-dir", "results"]
    return Invocation(command=command)


def _guidellm(tool: Tool, run: Run) -> Invocation:
    backend = {
        "kind": "openai_http",
        "target": run.url,
        "model": "mock",
        "request_format": "/v1/completions",
    }
    data = {"kind": "mooncake", "hash_id_block_size": run.block_size}
    data["source"] = {"kind": "json_file", "path": str(run.mooncake)}
    command = [_program(tool, "guidellm"), "run", "--backend", json.dumps(backend)]
    command += ["--profile", "kind=replay,time_scale=0.001", "--data", json.dumps(data)]
    command += ["--tokenizer", f"kind=hf_auto,model={run.tokenizer}"]
    command += ["--output", "kind=json,path=results.json", "--disable-console"]
    workers = str(len(os.sched_getaffinity(0)))
    return Invocation(command=command, variables={"GUIDELLM__MAX_WORKER_PROCESSES": workers})


def _inference_perf(tool: Tool, run: Run) -> Invocation:
    """Write the configuration, and the trace in Azure's format."""
    zero = datetime(2026, 1, 1, tzinfo=UTC)
    trace = run.folder / "azure.csv"
    lines = [json.loads(line) for line in run.mooncake.read_text().splitlines()]
    with trace.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for line in lines:
            at = zero + timedelta(milliseconds=line["timestamp"])
            stamp = at.strftime("%Y-%m-%d %H:%M:%S.%f")
            writer.writerow([stamp, line["input_length"], line["output_length"]])
    source = {"file": str(trace), "format": "AzurePublicDataset"}
    seconds = max(1, round((lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1000))
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "trace": source},
        "load": {
            "type": "trace_replay",
            "trace": source,
            "stages": [{"rate": run.rows / seconds, "duration": seconds}],
            "worker_max_concurrency": 1000,
        },
        "server": {
            "type": "vllm",
            "model_name": "mock",
            "base_url": run.url,
            "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(run.tokenizer)},
        "metrics": {"type": "default"},
        "report": {"request_lifecycle": {"summary": True, "per_request": True}},
        "storage": {"local_storage": {"path": "results"}},
    }
    # JSON is YAML.
    (run.folder / "config.yml").write_text(json.dumps(config))
    return Invocation(command=[_program(tool, "inference-perf"), "--config_file", "config.yml"])


def _vllm(tool: Tool, run: Run) -> Invocation:
    command = [_program(tool, "vllm"), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", run.url, "--model", "mock", "--tokenizer", str(run.tokenizer)]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(run.mooncake)]
    command += ["--timed-trace-chunk-hash-size", str(run.block_size)]
    command += ["--timed-trace-sec-multiplier", "0.001", "--num-prompts", str(run.rows)]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    return Invocation(command=command, variables={"PYTHONHASHSEED": "0"})


def _program(tool: Tool, name: str) -> str:
    assert tool.environment is not None
    return tool.environment.program(name)


_TOOLS: Final = (
    Tool(name="bare", title="bare aiohttp loop", invoke=_bare),
    # An invalid run has the exit code 3.
    Tool(name="replay", title="`replay`", invoke=_replay, exit_codes=(0, 3)),
    Tool(
        name="replay-ui",
        title="`replay --ui`, page open",
        invoke=_replay,
        page=True,
        exit_codes=(0, 3),
    ),
    Tool(
        name="aiperf",
        title="AIPerf 0.13.0",
        invoke=_aiperf,
        environment=Environment(name="aiperf-0.13.0", packages=("aiperf==0.13.0",)),
    ),
    Tool(
        name="guidellm",
        title="GuideLLM 0.8.1",
        invoke=_guidellm,
        environment=Environment(
            name="guidellm-0.8.1", packages=("guidellm[recommended]==0.8.1", _TORCH)
        ),
    ),
    Tool(
        name="inference-perf",
        title="inference-perf 0.7.0",
        invoke=_inference_perf,
        environment=Environment(
            name="inference-perf-0.7.0", packages=("inference-perf==0.7.0",), python="3.12"
        ),
    ),
    Tool(
        name="vllm",
        title="`vllm bench serve` 0.33.0",
        invoke=_vllm,
        # With all its dependencies the package needs several gigabytes more. These are the ones
        # that `vllm bench serve` imports.
        environment=Environment(
            name="vllm-0.33.0",
            packages=(
                _TORCH,
                *("transformers>=5.16.1,<5.21", "aiohttp", "anthropic", "blake3", "cachetools"),
                *("cbor2", "cloudpickle", "datasets", "einops", "fastapi", "ijson", "jsonschema"),
                *("lark", "mcp", "msgspec", "numpy", "openai", "orjson", "oss-harmony", "pandas"),
                *("partial-json-parser", "pillow", "prometheus-client", "protobuf", "psutil"),
                *("prometheus-fastapi-instrumentator", "py-cpuinfo", "pybase64", "pydantic"),
                *("python-json-logger", "pyyaml", "pyzmq", "regex", "requests", "sentencepiece"),
                *("setproctitle", "starlette", "tiktoken", "tqdm", "uvloop", "watchfiles"),
            ),
            bare_packages=(
                *("vllm==0.33.0", "xgrammar==0.2.8", "llguidance>=1.7,<1.8"),
                "apache-tvm-ffi==0.1.11",
            ),
        ),
    ),
)
TOOLS: Final = {tool.name: tool for tool in _TOOLS}
