"""Tokens per second of the engine on a real model, beside `generate` of transformers.

Both compute the same greedy tokens of the same prompts in one process, with the same threads, and
without HTTP. *Equal*: all prompts and outputs have one length, so that `generate` wastes nothing.
*Ragged*: lengths differ. `generate` then pads the prompts of a batch, and runs it to its longest
output, while the engine starts a request as soon as another one has ended. Only the requested
tokens count. The two take turns, and each rate is per second of CPU time, which other processes of
the machine change less than the wall-clock time. `depth` is the number of plans that wait behind
the running one.

    make smollm2
    python -m benchmarks.throughput
    python -m benchmarks.throughput --quick     # one short round
    python -m benchmarks.throughput --sampling  # needs no model

`--sampling` instead measures the choice of the tokens alone, on random logits of a vocabulary. The
probability of a token falls with the square of its rank, about as those of a model do.

The exit code is 1 if an aim is missed, except with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from goodput_core.spec.choices import ControlMode, Policy
from goodput_engine.core.build import build_model_core, configuration
from goodput_engine.executor.base import LoadedModel
from goodput_engine.manifest_file import read_manifest
from goodput_engine.messages import ExecutorInput, SamplingOptions, Submit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from goodput_engine.core.engine_core import EngineCore

ROOT = Path(__file__).parent.parent
EQUAL_AIM: Final = 0.95
RAGGED_AIM: Final = 1.5
BLOCKS: Final = 1024
BLOCK_SIZE: Final = 16
VOCABULARY: Final = 49_152
"""Logits of SmolLM2."""
SAMPLED_ROWS: Final = (1, 8, 32, 256)
QUICK_SAMPLED_ROWS: Final = (1, 32)
PROMPT_TOKENS: Final = 64
GREEDY: Final = SamplingOptions()
SAMPLING: Final = {
    "greedy": GREEDY,
    "temperature": SamplingOptions(temperature=0.8),
    "temperature, min-p": SamplingOptions(temperature=0.8, min_p=0.05),
    "temperature, top-k 50, top-p 0.95": SamplingOptions(temperature=0.8, top_k=50, top_p=0.95),
    "temperature, repetition and frequency penalty": SamplingOptions(
        temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2
    ),
}


@dataclass(frozen=True, kw_only=True)
class TokenLoad:
    """Requests that arrive together.

    Args:
        name: name in the table.
        batch: largest number of requests that run together.
        prompts: token ids of the prompts.
        outputs: number of output tokens of each request.
        aim: least ratio of the engine's rate to that of `generate`; None without an aim.
    """

    name: str
    batch: int
    prompts: Sequence[list[int]]
    outputs: Sequence[int]
    aim: float | None


def equal_load(batch: int, vocabulary: int, *, prompt: int, output: int) -> TokenLoad:
    """Return a load of one batch of equal requests."""
    stream = random.Random(batch)
    prompts = [[stream.randrange(vocabulary) for _ in range(prompt)] for _ in range(batch)]
    return TokenLoad(
        name=f"equal, batch {batch}",
        batch=batch,
        prompts=prompts,
        outputs=[output] * batch,
        aim=EQUAL_AIM,
    )


def ragged_load(batch: int, vocabulary: int, *, requests: int, longest: int) -> TokenLoad:
    """Return a load of requests with prompts and outputs of 1 to `longest` tokens."""
    stream = random.Random(99)
    prompts = [
        [stream.randrange(vocabulary) for _ in range(stream.randint(1, longest))]
        for _ in range(requests)
    ]
    return TokenLoad(
        name=f"ragged, batch {batch}",
        batch=batch,
        prompts=prompts,
        outputs=[stream.randint(1, longest) for _ in prompts],
        aim=RAGGED_AIM,
    )


class EngineBench:
    """The engine on a model, with a new core for each load."""

    def __init__(self, manifest: Path, threads: int) -> None:
        import torch

        from goodput_engine.executor.torch.loading import load_model

        torch.set_num_threads(threads)
        spec = read_manifest(manifest).spec
        self.path = Path(spec.model.source.removeprefix("file://")).expanduser()
        self._model = load_model(self.path)
        self._engine = replace(spec.engine, policy=Policy.SARATHI)
        self.vocab_size = self._model.vocab_size

    def core(self, batch: int, depth: int) -> EngineCore:
        """Return a core with an empty pool."""
        from goodput_engine.executor.torch.executor import TorchExecutor
        from goodput_engine.executor.torch.roofline import measure_roofline

        executor = TorchExecutor(
            self._model, num_blocks=BLOCKS, block_size=BLOCK_SIZE, clock=time.monotonic_ns
        )
        loaded = LoadedModel(
            executor=executor,
            name=self.path.name,
            vocab_size=self.vocab_size,
            max_model_tokens=self._model.max_model_tokens,
            block_size=BLOCK_SIZE,
            kv_blocks=BLOCKS,
            host_blocks=0,
            swap_ns_per_block=1,
            longest_step_ns=1,
            facts={},
            measure_roofline=lambda: measure_roofline(self._model),
        )
        config = configuration(self._engine, mode=ControlMode.MANUAL, device="")
        config = structs.replace(config, max_num_seqs=batch, max_waiting=100_000, depth=depth)
        return build_model_core(config, loaded)

    def serve(self, load: TokenLoad, depth: int) -> list[list[int]]:
        """Serve all requests of a load and return the ids of their tokens."""
        core = self.core(load.batch, depth)
        now_ns = time.monotonic_ns()
        found: list[list[int]] = [[] for _ in load.prompts]
        for at, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True)):
            rejected = core.submit(
                Submit(
                    rid=at,
                    arrival_ns=now_ns,
                    input_tokens=len(prompt),
                    max_output_tokens=output,
                    executor=ExecutorInput(token_ids=prompt, ignore_eos=True),
                ),
                now_ns,
            )
            assert rejected is None, rejected
        while core.scheduler.has_work:
            outputs = core.step(time.monotonic_ns())
            for one in outputs.outputs if outputs is not None else ():
                found[one.rid] += one.token_ids
        return found


class StaticBench:
    """`generate` on the same weights, in static batches."""

    def __init__(self, path: Path) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()

    def serve(self, load: TokenLoad) -> list[list[int]]:
        """Generate all batches of a load and return the ids of the requested tokens."""
        import torch

        found: list[list[int]] = []
        for at in range(0, len(load.prompts), load.batch):
            prompts = load.prompts[at : at + load.batch]
            outputs = load.outputs[at : at + load.batch]
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
            mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
            generated = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max(outputs),
                max_new_tokens=max(outputs),
                repetition_penalty=1.0,
                eos_token_id=self._model.config.vocab_size,
                pad_token_id=0,
            )
            rows = generated[:, longest:].tolist()
            found += [row[:length] for row, length in zip(rows, outputs, strict=True)]
        return found


def cpu_seconds(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the CPU time of a call, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


@dataclass(frozen=True, kw_only=True)
class RateRow:
    """Rates of one load.

    Args:
        load: name of the load.
        static_per_s: tokens per CPU second of `generate`, median of the rounds.
        engine_per_s: those of the engine, by depth.
        ratio: median ratio of the engine without plans in flight to `generate`, of each round.
        differing: requests whose tokens are not all equal to those of `generate`.
        aim: least ratio; None without an aim.
    """

    load: str
    static_per_s: float
    engine_per_s: dict[int, float]
    ratio: float
    differing: int
    aim: float | None


def measure(
    load: TokenLoad, engine: EngineBench, static: StaticBench, *, rounds: int, depths: Sequence[int]
) -> RateRow:
    """Let all take turns on a load."""
    tokens = sum(load.outputs)
    static_s: list[float] = []
    engine_s: dict[int, list[float]] = {depth: [] for depth in depths}
    differing = 0
    for _ in range(rounds):
        seconds, expected = cpu_seconds(lambda: static.serve(load))
        static_s.append(seconds)
        for depth in depths:
            seconds, found = cpu_seconds(lambda: engine.serve(load, depth))  # noqa: B023
            engine_s[depth].append(seconds)
            differing = sum(a != b for a, b in zip(found, expected, strict=True))
    return RateRow(
        load=load.name,
        static_per_s=tokens / median(static_s),
        engine_per_s={depth: tokens / median(times) for depth, times in engine_s.items()},
        ratio=median(a / b for a, b in zip(static_s, engine_s[depths[0]], strict=True)),
        differing=differing,
        aim=load.aim,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """CPU times of the sampling of a step.

    Args:
        options: name of the sampling options.
        step_ms: milliseconds by number of rows, medians.
    """

    options: str
    step_ms: dict[int, float]


def measure_sampling(
    batches: Sequence[int], *, vocabulary: int, steps: int, threads: int
) -> list[SamplingRow]:
    """Sample the tokens of some steps for each kind of options and each number of rows."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(3)
    by_rank = -2 * torch.arange(1, vocabulary + 1).log()
    logits = torch.stack([by_rank[torch.randperm(vocabulary)] for _ in range(max(batches))])
    return [
        SamplingRow(
            options=name,
            step_ms={
                batch: 1000 * _sampling_seconds(logits[:batch], options, steps=steps)
                for batch in batches
            },
        )
        for name, options in SAMPLING.items()
    ]


def _sampling_seconds(logits: torch.Tensor, options: SamplingOptions, *, steps: int) -> float:
    """Return the median CPU time of a step, without the first one, which also allocates."""
    from goodput_engine.executor.torch.sampling import RequestSampling, SampledRow, Sampler

    stream = random.Random(5)
    prompt = [stream.randrange(logits.shape[1]) for _ in range(PROMPT_TOKENS)]
    # An engine has no such object for a request that needs none.
    samplings = [
        None if options == GREEDY else RequestSampling(structs.replace(options, seed=seed), prompt)
        for seed in range(len(logits))
    ]
    sampler = Sampler()
    seconds: list[float] = []
    for step in range(steps + 1):
        rows = [SampledRow(one, PROMPT_TOKENS + step) for one in samplings]
        changed = logits.clone()
        began = time.process_time()
        tokens = sampler.sample(changed, rows)
        seconds.append(time.process_time() - began)
        for sampling, token in zip(samplings, tokens, strict=True):
            if sampling is not None:
                sampling.append(token.token_id)
    return median(seconds[1:])


def _print_sampling(rows: Sequence[SamplingRow]) -> None:
    batches = rows[0].step_ms
    headings = [f"{batch} row{'s' * (batch > 1)}" for batch in batches]
    print(f"| options | {' | '.join(headings)} | per row of the last |")
    print(f"| --- | {'---: | ' * (len(batches) + 1)}".rstrip())
    for row in rows:
        times = [f"{ms:.2f} ms" for ms in row.step_ms.values()]
        batch, last_ms = list(row.step_ms.items())[-1]
        print(f"| {row.options} | {' | '.join(times)} | {1000 * last_ms / batch:.0f} µs |")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    if find_spec("torch") is None:
        print("not run: torch is missing; `make smollm2` installs it")
        return 0
    if args.sampling:
        sampled = measure_sampling(
            QUICK_SAMPLED_ROWS if args.quick else SAMPLED_ROWS,
            vocabulary=VOCABULARY,
            steps=2 if args.quick else 20,
            threads=args.threads,
        )
        if args.json:
            print(json.dumps({"rows": [asdict(row) for row in sampled]}))
        else:
            _print_sampling(sampled)
        return 0
    if args.quick:
        args.rounds, args.batches, args.prompt, args.output = 1, [2], 8, 4
    engine = EngineBench(args.manifest, args.threads)
    static = StaticBench(engine.path)
    vocabulary = engine.vocab_size
    loads = [
        equal_load(batch, vocabulary, prompt=args.prompt, output=args.output)
        for batch in args.batches
    ]
    largest = max(args.batches)
    loads.append(ragged_load(largest, vocabulary, requests=3 * largest, longest=args.prompt))
    rows = [measure(load, engine, static, rounds=args.rounds, depths=(0, 1)) for load in loads]
    missed = [row.load for row in rows if row.aim is not None and row.ratio < row.aim]
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "missed": missed}))
    else:
        print("| load | `generate` | engine | depth 1 | ratio | aim | differing outputs |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for row in rows:
            print(
                f"| {row.load} | {row.static_per_s:.1f} | {row.engine_per_s[0]:.1f} "
                f"| {row.engine_per_s[1]:.1f} | {row.ratio:.2f} | {row.aim} | {row.differing} |"
            )
    return int(bool(missed) and not args.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[Any]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--manifest", type=Path, default=ROOT / "examples/smollm2.yaml")
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="batch sizes (1,8)")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens (%(default)s)")
    parser.add_argument("--output", type=int, default=32, help="output tokens (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="that compute (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each load (%(default)s)")
    parser.add_argument("--sampling", action="store_true", help="measure the sampling alone")
    parser.add_argument("--quick", action="store_true", help="a short form, without aims")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
