"""Tiny random models in Hugging Face's format, their own outputs, and an engine that serves them.

Import this module only after `pytest.importorskip("torch")`.
"""

from __future__ import annotations

import json
import random
import textwrap
import weakref
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.builders.queued_downloads import QueuedDownloads
from tests.builders.schedulers import make_scheduler

from goodput_core.placement.blockhash import block_hashes
from goodput_core.slo.targets import Targets
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.executor.torch.executor import TorchExecutor
from goodput_engine.executor.torch.loading import load_model
from goodput_engine.executor.torch.model import PackedModel
from goodput_engine.executor.torch.padded_decodes import PaddedDecodes
from goodput_engine.messages import (
    ExecutorInput,
    Limits,
    SamplingOptions,
    SetLimits,
    StepOutputs,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from goodput_core.spec.choices import Preemption
    from goodput_engine.executor.torch.block_copies import CopyStreams
    from goodput_engine.executor.torch.downloads import Downloads
    from goodput_engine.executor.torch.grammar import Grammars
    from goodput_engine.executor.torch.padded_decodes import StepRecorder
    from goodput_engine.scheduler.plan import TokenLogprobs

__all__ = ["ARCHITECTURES", "ModelBench", "Outputs", "TinyModel", "add_code", "make_folder"]

VOCABULARY = 97
CONTEXT = 128
STOP_IDS = [5, 11, 17, 29, 44, 58, 71, 83]
_NO_TARGETS = Targets()
_GREEDY = SamplingOptions()

# Configurations of transformers and their particular fields. Windows are shorter than prompts.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 7},
    "Gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 7,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
    },
    "Gemma3Text": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "Phi3": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "Starcoder2": {"sliding_window": 7},
    "Cohere": {},
    "Granite": {},
    "Mixtral": {"num_local_experts": 4},
    "GPT2": {},
}


def make_folder(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a random model of an architecture, and return the folder."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        # Larger weights than usual, so that outputs do not repeat one token.
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": STOP_IDS,
        **ARCHITECTURES.get(architecture, {}),
        **changes,
    }
    config = getattr(transformers, f"{architecture}Config")(**values)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def add_code(folder: Path, statements: str) -> None:
    """Let a folder with a Llama model have code of its own, which needs `--allow-remote-code`.

    Args:
        folder: the folder.
        statements: Python code that runs before each forward pass. It sees `torch`, `input_ids`,
            `[1, num_tokens]`, and `self.calls`, the number of passes including this one.
    """
    (folder / "modeling_own.py").write_text(
        _MODELING + textwrap.indent(statements, " " * 8) + _REST
    )
    config = folder / "config.json"
    changes = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


_MODELING = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    calls = 0

    def forward(self, input_ids=None, **others):
        self.calls += 1
"""
_REST = """
        return super().forward(input_ids=input_ids, **others)
"""


class Outputs:
    """The greedy outputs of a model, by transformers' own `generate`."""

    max_tokens = 16

    def __init__(self, folder: Path, dtype: str) -> None:
        # SDPA of transformers ignores soft caps.
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        self._known: dict[object, list[int]] = {}

    def of(self, submit: Submit) -> tuple[list[int], str]:
        """Return the token ids of a request's output and the finish reason."""
        options, limit = submit.executor, submit.max_output_tokens
        assert limit is not None
        assert limit <= self.max_tokens
        key = (tuple(options.token_ids), options.min_tokens, options.ignore_eos)
        if key not in self._known:
            self._known[key] = self._generate(options)
        ids = self._known[key][:limit]
        stopped = not options.ignore_eos and ids[-1] in STOP_IDS
        return ids, "stop" if stopped else "length"

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logits after each token, `[num_tokens, vocab_size]`."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0]
        return logits.clone()  # outside of the mode, it could not be changed

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of all ids after each token, `[num_tokens, vocab_size]`."""
        return self.logits(token_ids).log_softmax(-1)

    def _generate(self, options: ExecutorInput) -> list[int]:
        ids = torch.tensor([options.token_ids])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.max_tokens,
            min_new_tokens=options.min_tokens or None,
            # No token has this id, so no output stops.
            eos_token_id=VOCABULARY if options.ignore_eos else STOP_IDS,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, ids.shape[1] :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A tiny model, loaded for our executor and for `generate`."""

    packed: PackedModel
    outputs: Outputs

    @classmethod
    def build(
        cls, folder: Path, architecture: str, dtype: str, device: str = "cpu", **changes: Any
    ) -> TinyModel:
        """Save and load a random model of an architecture; `generate` always runs on the CPU."""
        make_folder(folder, architecture, **changes)
        packed = load_model(folder, dtype=dtype, device=torch.device(device))
        return cls(packed=packed, outputs=Outputs(folder, dtype))


class ModelBench:
    """An engine core that serves a model, and the observed outputs.

    All blocks that are free without a reusable prefix hold NaN, unless `poisons` is False.

    Args:
        model: the model.
        policy: name of the policy.
        preemption: preemption mode; there are as many host blocks as device blocks.
        blocks: number of device blocks.
        block_size: tokens per block.
        reuses_prefixes: False to give no request block hashes.
        grammars: compiles the grammars of outputs.
        starts_ahead: see `TorchExecutor`.
        downloads: copies of the sampled tokens; None for those of a GPU if steps start ahead.
        decode_sizes: sizes of the padded steps that only decode; empty for ragged ones.
        recorder: records the padded steps.
        streams: streams of copies; None for those of the device.
        poisons: True to fill free blocks with NaN after each step, which waits for their copies.
        scheduler: further arguments of `make_scheduler`.

    Attributes:
        ties: number of tokens that have not the highest logit, but are right because of a tie.
        compared_tokens: number of tokens that were compared up to ties.
    """

    def __init__(
        self,
        model: TinyModel,
        policy: str,
        preemption: Preemption,
        *,
        blocks: int,
        block_size: int,
        reuses_prefixes: bool = True,
        grammars: Grammars | None = None,
        starts_ahead: bool = False,
        downloads: Downloads | None = None,
        decode_sizes: Sequence[int] = (),
        recorder: StepRecorder | None = None,
        streams: CopyStreams | None = None,
        poisons: bool = True,
        **scheduler: Any,
    ) -> None:
        self.model = model
        self.ties = self.compared_tokens = 0
        self._reuses_prefixes = reuses_prefixes
        self.block_size = block_size
        host = 0 if preemption == "recompute" else blocks
        self.scheduler = make_scheduler(
            policy,
            blocks=blocks,
            block_size=block_size,
            host=host,
            preemption=preemption,
            model=CONTEXT,
            **scheduler,
        )
        self._ticks = count(0, 1_000)
        if downloads is None and starts_ahead and model.packed.device.type == "cpu":
            downloads = QueuedDownloads()
        self.executor = TorchExecutor(
            model.packed,
            num_blocks=blocks,
            block_size=block_size,
            num_host_blocks=host,
            grammars=grammars,
            clock=self.clock,
            starts_ahead=starts_ahead,
            downloads=downloads,
            streams=streams,
        )
        self._poisons = poisons
        # The states of samplings, whose penalties have a row on the device, and of grammars.
        self._states: list[Callable[[], object]] = []
        if decode_sizes:
            self.executor.padded = PaddedDecodes(
                model.packed, self.executor.pool, sizes=decode_sizes, recorder=recorder
            )
        self.core = EngineCore(scheduler=self.scheduler, executor=self.executor)
        self.submits: dict[int, Submit] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.finished: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.rejected: dict[int, str] = {}
        self._poison()

    def clock(self) -> int:
        """Return a later time at each call."""
        return next(self._ticks)

    def submit(
        self,
        length: int,
        max_output: int,
        *,
        family: int = 0,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        priority: int = 0,
        targets: Targets = _NO_TARGETS,
        output_tokens: int | None = None,
        sampling: SamplingOptions = _GREEDY,
        grammar: str = "",
    ) -> int:
        """Submit a request whose prompt begins like those of its family; return its number."""
        rid = len(self.submits)
        stream = random.Random(family)
        token_ids = [stream.randrange(VOCABULARY) for _ in range(length)]
        submit = Submit(
            rid=rid,
            arrival_ns=self.clock(),
            input_tokens=length,
            max_output_tokens=max_output,
            block_hashes=list(block_hashes(token_ids, self.block_size))
            if self._reuses_prefixes
            else [],
            priority=priority,
            targets=targets,
            executor=ExecutorInput(
                token_ids=token_ids,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                output_tokens=output_tokens,
                sampling=sampling,
                grammar=grammar,
            ),
        )
        self.submits[rid] = submit
        self.token_ids[rid] = []
        self.logprobs[rid] = []
        rejected = self.core.submit(submit, self.clock())
        if rejected is not None:
            self.rejected[rid] = rejected.reason
        sequence = self.executor._sequences.get(rid)
        if sequence is not None:
            states = (sequence.sampling, sequence.grammar)
            self._states += [weakref.ref(state) for state in states if state is not None]
        self._take_rejected()
        return rid

    def cancel(self, rid: int) -> None:
        """Cancel a request that has not finished; do nothing for another one."""
        if rid in self.submits and rid not in self.finished:
            self.cancelled.add(rid)
            self.core.cancel(rid)

    def set_limits(self, budget: int, seqs: int) -> None:
        """Change the token budget and the batch width."""
        limits = Limits(token_budget=budget, max_num_seqs=seqs)
        self.core.set_limits(SetLimits(revision=1, limits=limits))

    def step(self) -> StepOutputs | None:
        """Take one step."""
        outputs = self.core.step(self.clock())
        self._take_rejected()
        self.scheduler.check_integrity()
        self._poison()
        for output in outputs.outputs if outputs else ():
            assert len(output.token_ids) == output.new_tokens
            assert output.rid not in self.finished
            self.token_ids[output.rid] += output.token_ids
            self.logprobs[output.rid] += output.logprobs
            if output.finish_reason is not None:
                self.finished[output.rid] = output.finish_reason
        return outputs

    def finish(self, *, broken: bool = False) -> None:
        """Take steps until no request is left, and check that all of its resources are free.

        Args:
            broken: True if the logits of a request may not be finite numbers. Otherwise such logits
                mean that an unwritten block was read.
        """
        self.core.drain()
        for _ in range(5_000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        self._check_released()
        assert broken or "not_finite" not in self.rejected.values()

    def _check_released(self) -> None:
        """Check that executor and scheduler hold nothing of any request."""
        executor = self.executor
        assert not executor._sequences
        # The next plan removes requests from the decode batch that have ended since the last one.
        assert sorted(executor._members) == sorted(self.scheduler._table.batch._left)
        assert not executor._plans
        assert [state for state in self._states if state() is not None] == []
        free_host_blocks, host_blocks = self.scheduler.host_blocks
        assert free_host_blocks == host_blocks
        assert self.scheduler.free_blocks == self.scheduler.total_blocks

    def run_dry(self, *, tie: float = 0.0) -> None:
        """Take steps until no request is left, and compare every output with `generate`.

        Args:
            tie: difference to the highest logit below which another token is right as well; 0 if
                outputs are equal.
        """
        self.finish()
        for rid, submit in self.submits.items():
            if tie:
                self._check_up_to_ties(rid, tie)
                continue
            ids, reason = self.model.outputs.of(submit)
            own = self.token_ids[rid]
            if rid in self.cancelled or rid in self.rejected:  # shorter
                assert own == ids[: len(own)]
            else:
                assert (own, self.finished[rid]) == (ids, reason)

    def _check_up_to_ties(self, rid: int, tie: float) -> None:
        """Compare each token of an output with the logits after the tokens before it.

        After a tie, `generate` continues differently, so its output is not comparable.
        """
        submit, own = self.submits[rid], self.token_ids[rid]
        options, limit = submit.executor, submit.max_output_tokens
        logits = self.model.outputs.logits([*options.token_ids, *own])
        for at, (token_id, row) in enumerate(
            zip(own, logits[submit.input_tokens - 1 : -1], strict=True)
        ):
            if at < options.min_tokens and not options.ignore_eos:
                row[STOP_IDS] = -torch.inf
            if token_id != int(row.argmax()):
                assert float(row.max() - row[token_id]) < tie, f"token {at} of request {rid}"
                self.ties += 1
        self.compared_tokens += len(own)
        stops = [] if options.ignore_eos else STOP_IDS
        assert not any(token_id in stops for token_id in own[:-1])
        if rid not in self.cancelled and rid not in self.rejected:
            stopped = own[-1] in stops
            assert stopped or len(own) == limit
            assert self.finished[rid] == ("stop" if stopped else "length")

    def _take_rejected(self) -> None:
        for one in self.core.take_rejected():
            assert one.rid not in self.rejected, "a request is rejected once"
            self.rejected[one.rid] = one.reason

    def _poison(self) -> None:
        if not self._poisons:
            return
        blank = self.scheduler._kv._blank
        pool = self.executor.pool
        pool.before_step([blank])  # a free block may still be the source of a copy
        pool.device_blocks[blank] = torch.nan
