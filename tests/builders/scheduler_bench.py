"""A scheduler with clients, and a simulated device that checks every plan."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.scheduler.plan import StepOutcome, StepPlan, StepResult
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

_BLOCK = 4
_NONE = Targets()
# A step takes about two nanoseconds here: some targets hold, some only for the first request.
TARGETS = (
    _NONE,
    Targets(tpot_ns=NS_PER_MS),
    Targets(ttft_ns=6, tpot_ns=3),
    Targets(ttft_ns=40, tpot_ns=8),
    Targets(ttft_ns=400, e2e_ns=600),
)


class MirrorExecutor:
    """Applies plans like a device, and fails on a plan that a device could not run."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.lengths: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.sampled: dict[int, int] = {}
        self.batch: dict[int, None] = {}
        self.plans: deque[tuple[StepPlan, dict[int, str]]] = deque()
        self.device: dict[int, dict[int, tuple[int, int]] | None] = {}
        self.host: dict[int, dict[int, tuple[int, int]] | None] = {}
        self.families: dict[int, int] = {}

    def _write(self, rid: int, position: int) -> None:
        """Store the keys and values of a token in its slot."""
        block = self.tables[rid][position // _BLOCK]
        # Other holders of the old contents, a copy or a prefix, keep them.
        slots = dict(self.device.get(block) or {})
        slots[position % _BLOCK] = (self._text(rid, position), position)
        self.device[block] = slots

    def _read(self, rid: int, position: int) -> None:
        """Check that a slot holds the keys and values of a token."""
        block = self.tables[rid][position // _BLOCK]
        slots = self.device.get(block) or {}
        assert slots.get(position % _BLOCK) == (self._text(rid, position), position)

    def _text(self, rid: int, position: int) -> int:
        """Return a token; requests of one family have equal prompts and different outputs."""
        family, prompt = self.families[rid], self.prompts[rid]
        shared = family and position < prompt // _BLOCK * _BLOCK
        return -family if shared else rid

    def submit(self, plan: StepPlan, budget: int) -> None:
        for rid in plan.left:
            del self.batch[rid]
        for admitted in plan.admitted:
            self.tables[admitted.rid] = list(admitted.blocks)
            self.computed[admitted.rid] = admitted.cached_tokens
        for join in plan.joined:
            assert join.rid not in self.batch
            assert join.start == self.computed[join.rid]
            assert join.output_tokens == self.sampled[join.rid]
            self.batch[join.rid] = None
        for rid, block in plan.new_blocks:
            self.tables[rid].append(block)
        copying = {copy.rid for copy in plan.copies}
        for copy in plan.copies:
            pairs = zip(copy.device_blocks, copy.host_blocks, strict=True)
            for device, host in pairs:
                if copy.to_host:
                    self.host[host] = self.device.get(device)
                else:
                    assert self.pool.writable(device), "a copy into a shared block"
                    self.device[device] = self.host[host]
        work = [(c.rid, c.start, c.num_tokens, c.samples) for c in plan.chunks]
        assert bool(plan.decode_epoch) == bool(plan.num_decodes)
        if plan.num_decodes:
            assert plan.num_decodes == len(self.batch)
            work += [(rid, self.computed[rid], 1, True) for rid in self.batch]
        assert work or plan.copies, "an empty plan"
        assert not copying & {rid for rid, *_ in work}, "a request is computed while it is copied"
        assert len({rid for rid, *_ in work}) == len(work), "a request twice in one step"
        stopped: dict[int, str] = {}
        written: set[int] = set()
        for rid, start, tokens, samples in work:
            assert start == self.computed[rid], "computed tokens fell, or were skipped"
            self.computed[rid] = start + tokens
            table = self.tables[rid]
            blocks = table[start // _BLOCK : (start + tokens - 1) // _BLOCK + 1]
            assert len(blocks) == (start + tokens - 1) // _BLOCK + 1 - start // _BLOCK
            assert all(self.pool.writable(block) for block in blocks), "writes to a shared block"
            assert not written & set(blocks), "two requests write to one block"
            written |= set(blocks)
            for position in range(start):
                self._read(rid, position)
            for position in range(start, start + tokens):
                self._write(rid, position)
            if samples:
                self.sampled[rid] = self.sampled.get(rid, 0) + 1
                if self.sampled[rid] == self.lengths[rid]:
                    stopped[rid] = "stop"
        chunks = [(chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        assert plan.shape == StepShape.of(
            decodes=plan.num_decodes,
            decode_context_tokens=sum(s + n for _, s, n, _ in work) - sum(map(sum, chunks)),
            chunks=chunks,
        )
        assert plan.shape.num_tokens == sum(tokens for _, _, tokens, _ in work) <= budget
        self.plans.append((plan, stopped))


@dataclass
class SchedulerBench:
    """A scheduler, its simulated device, and the observed outputs."""

    policy: str
    depth: int
    total_blocks: int
    preemption: Preemption = Preemption.RECOMPUTE
    max_num_seqs: int = 8
    now_ns: int = 0
    decisions: list[StepPlan] = field(default_factory=list)
    results: list[dict[int, str]] = field(default_factory=list)
    gained: dict[int, int] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    rejected: set[int] = field(default_factory=set)
    requests: dict[int, ScheduledRequest] = field(default_factory=dict)
    preempted_at: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(total_blocks=self.total_blocks, block_size=_BLOCK)
        # Half as much host memory as there is on the device, three blocks a step.
        self.host = HostPool(
            total_blocks=0 if self.preemption is Preemption.RECOMPUTE else self.total_blocks // 2,
            ns_per_block=1,
        )
        self.scheduler = Scheduler(
            policy=build_policy(self.policy),
            kv=self.pool,
            limits=SchedulerLimits(
                token_budget=16, max_num_seqs=self.max_num_seqs, max_waiting=1000
            ),
            max_model_tokens=1000,
            depth=self.depth,
            host=self.host,
            preemption=self.preemption,
        )
        self.executor = MirrorExecutor(self.pool)

    def submit(
        self,
        tokens: int,
        max_output: int | None,
        length: int,
        family: int,
        targets: Targets = _NONE,
    ) -> None:
        rid = len(self.requests)
        request = ScheduledRequest(
            rid=rid,
            arrival_ns=self.now_ns,
            input_tokens=tokens,
            max_output_tokens=max_output,
            block_hashes=[family * 1000 + i for i in range(tokens // _BLOCK)] if family else [],
            priority=rid % 4 - 1,
            targets=targets,
        )
        self.requests[rid] = request
        self.executor.lengths[rid] = length
        self.executor.families[rid] = family
        self.executor.prompts[rid] = tokens
        rejection = self.scheduler.add(request, self.now_ns)
        for removal in self.scheduler.admission.take_removed():
            assert removal.rejection.reason == "displaced"
            assert removal.request.priority < request.priority
            self.rejected.add(removal.request.rid)
        if rejection is not None:
            self.rejected.add(rid)
            if rejection.reason == "memory_full":
                assert self.host.free_blocks < self.host.total_blocks
                return
            if rejection.reason == "unattainable":
                assert targets.ttft_ns is not None
                return
            assert rejection.reason == "too_long"
            bound = self.total_blocks * _BLOCK + 1
            assert tokens >= bound or (max_output is not None and tokens + max_output > bound)

    def plan(self) -> bool:
        self.now_ns += 1
        before = self.scheduler.num_running
        plan = self.scheduler.plan(self.now_ns)
        for removal in self.scheduler.admission.take_removed():
            assert removal.rejection.reason in ("displaced", "unattainable")
            self.rejected.add(removal.request.rid)
        if plan is None:
            return False
        width = max(before, self.scheduler.limits.max_num_seqs)
        assert plan.shape.num_requests <= width, (
            "the batch exceeds its width although the limit was not lowered"
        )
        self.executor.submit(plan, self.scheduler.limits.token_budget)
        self.decisions.append(plan)
        self._note_preemptions()
        return True

    def commit(self) -> StepOutcome | None:
        if not self.executor.plans:
            return None
        self.now_ns += 1
        plan, stopped = self.executor.plans.popleft()
        self.results.append(stopped)
        result = StepResult(plan_id=plan.plan_id, at_ns=self.now_ns, step_ns=3, stopped=stopped)
        outcome = self.scheduler.commit(plan, result, self.now_ns)
        emitted = [*outcome.advanced, *(p.request.rid for p in outcome.progress)]
        assert len(emitted) == len(set(emitted)), "a request gained two tokens in one step"
        for rid in emitted:
            assert rid not in self.finished
            assert rid not in self.cancelled
            self.gained[rid] = self.gained.get(rid, 0) + 1
            assert self.requests[rid].output_tokens == self.gained[rid]
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.finished[progress.request.rid] = progress.finish_reason
        for rid in outcome.released:
            assert rid in self.finished or rid in self.cancelled
        return outcome

    def cancel(self, rid: int) -> None:
        if rid in self.requests and rid not in self.finished:
            self.cancelled.add(rid)
            self.scheduler.cancel(rid)

    def check(self) -> None:
        self.scheduler.check_integrity()
        pool = self.pool
        tables = [r.blocks for r in self.requests.values()]
        live = {block for table in tables for block in table}
        assert pool.free_blocks + len(live) == pool.total_blocks
        assert 0 <= self.scheduler.shared_blocks() <= len(live)
        copies = sum(len(r.host_blocks) for r in self.requests.values())
        assert self.host.free_blocks + copies == self.host.total_blocks

    def run_dry(self) -> None:
        self.scheduler.end_input()
        work = sum(r.input_tokens + self.executor.lengths[r.rid] for r in self.requests.values())
        for _ in range(100 + 40 * work):
            while self.plan():
                pass
            if self.commit() is None:
                break
            self.check()
        assert not self.scheduler.has_work, "work is left, but nothing is planned"
        assert self.pool.free_blocks == self.pool.total_blocks
        assert self.host.free_blocks == self.host.total_blocks

    def _note_preemptions(self) -> None:
        """A request is preempted again only after another one made progress."""
        progress = sum(r.sampled_tokens for r in self.requests.values())
        for rid, request in self.requests.items():
            count, then = self.preempted_at.get(rid, (0, -1))
            if request.preemptions > count:
                assert request.preemptions == count + 1
                assert progress > then, "a preemption cycle without progress"
                self.preempted_at[rid] = (request.preemptions, progress)
