"""The panels of the dashboards: titles, units and queries, without a word of Grafana's format.

`dashboards` makes Grafana's JSON from them, `pictures` draws them for the docs, and a test sends
every query to a Prometheus server that scraped a real service.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from goodput_core.contract import (
    METRIC_BUILD_INFO,
    METRIC_E2E,
    METRIC_MAX_NUM_SEQS,
    METRIC_MISSES,
    METRIC_OPERATOR_CALLS,
    METRIC_OPERATOR_LEADER,
    METRIC_OPERATOR_OVERDUE,
    METRIC_OPERATOR_TURN_SECONDS,
    METRIC_OPERATOR_TURNS,
    METRIC_OPERATOR_WAITING,
    METRIC_OUTPUT_TOKENS,
    METRIC_PREFIX_HIT,
    METRIC_PREFIX_QUERIED,
    METRIC_RECOMPUTED_TOKENS,
    METRIC_REQUESTS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
    METRIC_ROUTER_OUTPUT_TOKENS,
    METRIC_ROUTER_RETRIES,
    METRIC_SAFETY,
    METRIC_SCHEDULED_TOKENS,
    METRIC_SERVICE_ATTAINMENT_LOWER,
    METRIC_SERVICE_ATTAINMENT_UPPER,
    METRIC_SERVICE_CONDITION,
    METRIC_SERVICE_CONDITION_REASON,
    METRIC_SERVICE_DECISION_TIME,
    METRIC_SERVICE_DESIRED_REPLICAS,
    METRIC_SERVICE_GATE,
    METRIC_SERVICE_MAX_REPLICAS,
    METRIC_SERVICE_MAX_TOKEN_BUDGET,
    METRIC_SERVICE_MIN_REPLICAS,
    METRIC_SERVICE_MIN_TOKEN_BUDGET,
    METRIC_SERVICE_OBJECTIVE,
    METRIC_SERVICE_READY_REPLICAS,
    METRIC_SERVICE_RECOMMENDED_REPLICAS,
    METRIC_SERVICE_REPLICAS,
    METRIC_SERVICE_STARTUP,
    METRIC_SERVICE_TARGET,
    METRIC_SERVICE_TOKEN_BUDGET,
    METRIC_SHED,
    METRIC_STEP_SECONDS,
    METRIC_STEP_TIME_ERROR,
    METRIC_STEPS,
    METRIC_SWAPPED_TOKENS,
    METRIC_TBT,
    METRIC_TOKEN_BUDGET,
    METRIC_TPOT,
    METRIC_TTFT,
    MISSED_TARGETS,
)
from goodput_core.server_metrics import SERVER_METRICS, SGLANG_PREFIX, SGLANG_RANKS

__all__ = ["FLEET", "SERVICE", "DashboardSpec", "Look", "Panel", "PanelUnit", "Query", "Row"]


class PanelUnit(StrEnum):
    """Units, with Grafana's names."""

    COUNT = "short"
    SHARE = "percentunit"
    SECONDS = "s"
    PER_SECOND = "reqps"
    BYTES = "bytes"
    TIME = "dateTimeAsIso"


class Look(StrEnum):
    """Presentation of a panel."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBERS = "numbers"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel.

    Args:
        expr: PromQL, with Grafana's variables.
        legend: name of a series, with the labels in braces.
        dashed: True for a bound or a target, which is drawn dashed.
    """

    expr: str
    legend: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Args:
        title: its title.
        note: its description.
        unit: unit of its values.
        queries: its queries.
        look: its presentation.
        largest: upper end of its axis; None for that of the data.
        limits: values at which a horizontal line is drawn.
        gate: True if there is data only during a gated rollout.
        empty: text without data; None for Grafana's.
    """

    title: str
    note: str
    unit: PanelUnit
    queries: tuple[Query, ...]
    look: Look = Look.LINES
    largest: float | None = None
    limits: tuple[float, ...] = ()
    gate: bool = False
    empty: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSpec:
    """One dashboard.

    Args:
        uid: its identifier, part of its URL.
        title: its title.
        note: its description.
        rows: its rows.
        of_service: True if variables select one service.
    """

    uid: str
    title: str
    note: str
    rows: tuple[Row, ...]
    of_service: bool = False


# Further label matchers.
_GOOD: Final = ',outcome="attained"'
_NOT_GOOD: Final = ',outcome=~"missed|shed|error|timeout"'
_REFUSED: Final = ',outcome=~"shed|error|timeout"'
_JUDGED: Final = ',outcome=~"attained|missed|shed|error|timeout"'
_OF_TARGETS: Final = f',reason=~"{"|".join(MISSED_TARGETS)}"'
_SERVICE: Final = 'namespace="$namespace",llmservice="$llmservice"'
_ENGINE: Final = f'{_SERVICE},role="engine"'
_BY_CLASS: Final = "sum by (slo_class)"
_BY_SERVICE: Final = "sum by (namespace, llmservice)"
_BY_SERVICE_CLASS: Final = "sum by (namespace, llmservice, slo_class)"
_RECENT: Final = "$__rate_interval"


def _rate(metric: str, labels: str, window: str = _RECENT) -> str:
    return f"rate({metric}{{{labels}}}[{window}])"


def _attained(labels: str, window: str, by: str) -> str:
    """Return the attainment: requests that met their targets over judged requests."""
    good = _rate(METRIC_REQUESTS, labels + _GOOD, window)
    judged = _rate(METRIC_REQUESTS, labels + _JUDGED, window)
    return f"{by} ({good})\n/\n({by} ({judged}) > 0)"


def _burn(labels: str, window: str, by: str) -> str:
    """Return the burn rate: misses in units of the misses that the objective permits."""
    objective = f"max {by.removeprefix('sum ')} ({METRIC_SERVICE_OBJECTIVE}{{{labels}}})"
    return f"(1 - {_attained(labels, window, by)})\n/\n(1 - {objective})"


def _quantile(share: float, metric: str, labels: str, by: str) -> str:
    buckets = _rate(f"{metric}_bucket", labels)
    return f"histogram_quantile({share}, sum by ({by}, le) ({buckets}))"


def _target(promise: str) -> Query:
    expr = f'{METRIC_SERVICE_TARGET}{{{_SERVICE},promise="{promise}"}}'
    return Query(expr=expr, legend="{{slo_class}} target", dashed=True)


def _latency(title: str, metric: str, promise: str, note: str) -> Panel:
    return Panel(
        title=title,
        note=f"{note} The p50 and p99 are exact to the buckets of the histogram.",
        unit=PanelUnit.SECONDS,
        queries=(
            Query(expr=_quantile(0.5, metric, _SERVICE, "slo_class"), legend="{{slo_class}} p50"),
            Query(expr=_quantile(0.99, metric, _SERVICE, "slo_class"), legend="{{slo_class}} p99"),
            _target(promise),
        ),
    )


def _gauge(metric: str, legend: str, *, dashed: bool = False) -> Query:
    return Query(expr=f"{metric}{{{_SERVICE}}}", legend=legend, dashed=dashed)


def _per_step(tokens: str, labels: str, by: str) -> str:
    steps = f"sum by ({by}) ({_rate(METRIC_STEPS, labels)})"
    return f"sum by ({by}) ({tokens})\n/\n({steps} > 0)"


def _of_any_server(reading: str, labels: str, *, rates: bool = False) -> str:
    """Return the series of a reading from Goodput's engines and from other servers.

    Args:
        reading: name of the reading, from `SERVER_METRICS`.
        labels: label matchers.
        rates: True for the rates of a counter.
    """
    series = []
    for metric in SERVER_METRICS[reading]:
        found = _rate(metric, labels) if rates else f"{metric}{{{labels}}}"
        if metric.startswith(SGLANG_PREFIX):
            # Each of these ranks counts all requests.
            found = f"max without ({', '.join(SGLANG_RANKS)}) ({found})"
        series.append(found)
    return " or ".join(series)


def _kv_usage(labels: str, by: str) -> str:
    """Return the share of the KV cache in use; other servers than Goodput's publish it as such."""
    blocks, *shares = SERVER_METRICS["kv_usage"]
    others = " or ".join(f"{one}{{{labels}}}" for one in shares)
    return (
        f'sum by ({by}) ({blocks}{{{labels},state="used"}})\n/\n'
        f"sum by ({by}) ({blocks}{{{labels}}})\nor\navg by ({by}) ({others})"
    )


_OUTPUT: Final = _rate(METRIC_OUTPUT_TOKENS, _ENGINE)
_SCHEDULED: Final = _rate(METRIC_SCHEDULED_TOKENS, _ENGINE)
_PROCESS: Final = (
    f'on (namespace, pod) group_left (role) {METRIC_BUILD_INFO}{{{_SERVICE},role=~"router|engine"}}'
)
_NO_PAIR: Final = "no gate in this time range"
_OF_PAIR: Final = f'{_SERVICE},role=~"candidate|baseline"'


SERVICE: Final = DashboardSpec(
    uid="goodput-service",
    title="Goodput / service",
    note="Attainment, error budget, control and engines of one LLMService.",
    of_service=True,
    rows=(
        Row(
            title="Goodput",
            panels=(
                Panel(
                    title="Attainment in this time range",
                    note="Share of the judged requests that met all targets of their class.",
                    unit=PanelUnit.SHARE,
                    look=Look.NUMBERS,
                    queries=(
                        Query(
                            expr=_attained(_SERVICE, "$__range", _BY_CLASS),
                            legend="{{slo_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="Conditions",
                    note="The conditions of the LLMService and their reasons.",
                    unit=PanelUnit.COUNT,
                    look=Look.TABLE,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_CONDITION_REASON}{{{_SERVICE}}}\n"
                            "* on (namespace, llmservice, condition) group_left (status)\n"
                            f"({METRIC_SERVICE_CONDITION}{{{_SERVICE}}} == 1)",
                            legend="{{condition}} {{status}} {{reason}}",
                        ),
                    ),
                ),
                Panel(
                    title="Goodput",
                    note="Requests per second that met all targets of their class; dashed: all "
                    "judged requests.",
                    unit=PanelUnit.PER_SECOND,
                    queries=(
                        Query(
                            expr=f"{_BY_CLASS} ({_rate(METRIC_REQUESTS, _SERVICE + _GOOD)})",
                            legend="{{slo_class}}",
                        ),
                        Query(
                            expr=f"{_BY_CLASS} ({_rate(METRIC_REQUESTS, _SERVICE + _JUDGED)})",
                            legend="{{slo_class}} judged",
                            dashed=True,
                        ),
                    ),
                ),
                Panel(
                    title="Attainment and objective",
                    note="Attainment of the last five minutes; dashed: the objective, and the "
                    "confidence bounds in the window of the condition SLOAttained.",
                    unit=PanelUnit.SHARE,
                    largest=1,
                    queries=(
                        Query(expr=_attained(_SERVICE, "5m", _BY_CLASS), legend="{{slo_class}}"),
                        _gauge(METRIC_SERVICE_OBJECTIVE, "{{slo_class}} objective", dashed=True),
                        _gauge(METRIC_SERVICE_ATTAINMENT_LOWER, "{{slo_class}} lower", dashed=True),
                        _gauge(METRIC_SERVICE_ATTAINMENT_UPPER, "{{slo_class}} upper", dashed=True),
                    ),
                ),
                Panel(
                    title="Outcomes",
                    note="Client requests by outcome. All but attained, cancelled and unjudged "
                    "are misses.",
                    unit=PanelUnit.PER_SECOND,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=f"sum by (outcome) ({_rate(METRIC_REQUESTS, _SERVICE)})",
                            legend="{{outcome}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Error budget",
            panels=(
                Panel(
                    title="Error budget left in this time range",
                    note="1 if no request missed its targets, 0 if as many did as the objective "
                    "permits, negative beyond.",
                    unit=PanelUnit.SHARE,
                    look=Look.NUMBERS,
                    queries=(
                        Query(
                            expr=f"1 - {_burn(_SERVICE, '$__range', _BY_CLASS)}",
                            legend="{{slo_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="Burn rate",
                    note="Misses in units of those that the objective permits. The alerts page "
                    "at 14.4 over an hour and at 6 over six hours.",
                    unit=PanelUnit.COUNT,
                    limits=(14.4, 6),
                    queries=(
                        Query(expr=_burn(_SERVICE, "1h", _BY_CLASS), legend="{{slo_class}} 1 h"),
                        Query(expr=_burn(_SERVICE, "6h", _BY_CLASS), legend="{{slo_class}} 6 h"),
                    ),
                ),
            ),
        ),
        Row(
            title="Missed targets",
            panels=(
                Panel(
                    title="Share of requests that missed a target",
                    note="Judged requests that missed a target, by target; one can miss several. "
                    "Refused and failed requests are not included.",
                    unit=PanelUnit.SHARE,
                    queries=(
                        Query(
                            expr="sum by (slo_class, reason) "
                            f"({_rate(METRIC_MISSES, _SERVICE + _OF_TARGETS)})\n"
                            "/ on (slo_class) group_left ()\n"
                            f"({_BY_CLASS} ({_rate(METRIC_REQUESTS, _SERVICE + _JUDGED)}) > 0)",
                            legend="{{slo_class}} {{reason}}",
                        ),
                    ),
                ),
                Panel(
                    title="Refused and failed requests",
                    note="Misses without regard to latency: shed because of load, failed, timed "
                    "out. Client errors (4xx) are not misses.",
                    unit=PanelUnit.PER_SECOND,
                    queries=(
                        Query(
                            expr="sum by (slo_class, outcome) "
                            f"({_rate(METRIC_REQUESTS, _SERVICE + _REFUSED)})",
                            legend="{{slo_class}} {{outcome}}",
                        ),
                        Query(
                            expr=f"sum ({_rate(METRIC_SHED, _ENGINE)})",
                            legend="shed by engines",
                        ),
                        Query(
                            expr="sum by (status) "
                            f"({_rate(METRIC_ROUTER_CLIENT_ERRORS, _SERVICE)})",
                            legend="client error {{status}}",
                            dashed=True,
                        ),
                        Query(
                            expr=f"sum by (reason) ({_rate(METRIC_ROUTER_RETRIES, _SERVICE)})",
                            legend="retry: {{reason}}",
                            dashed=True,
                        ),
                    ),
                ),
                _latency(
                    "Time to first token",
                    METRIC_TTFT,
                    "ttft",
                    "From the end of a request's upload to its first token.",
                ),
                _latency(
                    "Time per output token",
                    METRIC_TPOT,
                    "tpot",
                    "Mean time per token after the first.",
                ),
                _latency(
                    "Time between tokens",
                    METRIC_TBT,
                    "tbt_p99",
                    "Of all tokens of streams; the target bounds the p99 of each request's own.",
                ),
                _latency(
                    "End-to-end time",
                    METRIC_E2E,
                    "e2e",
                    "From the end of a request's upload to the end of its response.",
                ),
            ),
        ),
        Row(
            title="Control",
            panels=(
                Panel(
                    title="Replicas",
                    note="Requested, recommended and ready engines, and the bounds. Annotations "
                    "mark the decisions.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        _gauge(METRIC_SERVICE_DESIRED_REPLICAS, "requested"),
                        _gauge(METRIC_SERVICE_READY_REPLICAS, "ready"),
                        _gauge(METRIC_SERVICE_RECOMMENDED_REPLICAS, "recommended"),
                        _gauge(METRIC_SERVICE_MIN_REPLICAS, "minReplicas", dashed=True),
                        _gauge(METRIC_SERVICE_MAX_REPLICAS, "maxReplicas", dashed=True),
                    ),
                ),
                Panel(
                    title="Token budget",
                    note="Upper bound that the operator sets, the budget that engines use, and "
                    "the bounds of the spec.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        _gauge(METRIC_SERVICE_TOKEN_BUDGET, "set by the operator"),
                        Query(
                            expr=f"avg ({METRIC_TOKEN_BUDGET}{{{_ENGINE}}})",
                            legend="engines, mean",
                        ),
                        _gauge(METRIC_SERVICE_MIN_TOKEN_BUDGET, "min", dashed=True),
                        _gauge(METRIC_SERVICE_MAX_TOKEN_BUDGET, "max", dashed=True),
                    ),
                ),
                Panel(
                    title="Batch width",
                    note="Requests that may run at the same time on one engine.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(
                            expr=f"min ({METRIC_MAX_NUM_SEQS}{{{_ENGINE}}})", legend="max_num_seqs"
                        ),
                    ),
                ),
                Panel(
                    title="Safety factor",
                    note="Share of the tightest TPOT that a step is planned to take, and the "
                    "error of its prediction.",
                    unit=PanelUnit.SHARE,
                    queries=(
                        Query(expr=f"min ({METRIC_SAFETY}{{{_ENGINE}}})", legend="safety factor"),
                        Query(
                            expr=f"max ({METRIC_STEP_TIME_ERROR}{{{_ENGINE}}})",
                            legend="error of predicted step times",
                        ),
                    ),
                ),
                Panel(
                    title="Start-up time",
                    note="Latest time from the creation of a replica until it is routable.",
                    unit=PanelUnit.SECONDS,
                    queries=(_gauge(METRIC_SERVICE_STARTUP, "start-up"),),
                ),
                Panel(
                    title="Latest decisions",
                    note="When the control laws last decided for each reason, applied or only "
                    "recommended.",
                    unit=PanelUnit.TIME,
                    look=Look.TABLE,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_DECISION_TIME}{{{_SERVICE}}} * 1000",
                            legend="{{knob}} {{reason}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Engines",
            panels=(
                Panel(
                    title="Step time",
                    note="Device time of a step.",
                    unit=PanelUnit.SECONDS,
                    queries=(
                        Query(
                            expr=_quantile(0.5, METRIC_STEP_SECONDS, _ENGINE, "role"), legend="p50"
                        ),
                        Query(
                            expr=_quantile(0.99, METRIC_STEP_SECONDS, _ENGINE, "role"),
                            legend="p99",
                        ),
                        Query(
                            expr=f'min ({METRIC_SERVICE_TARGET}{{{_SERVICE},promise="tpot"}})',
                            legend="tightest TPOT",
                            dashed=True,
                        ),
                    ),
                ),
                Panel(
                    title="Composition of a step",
                    note="Mean number of tokens of a step: one for each running output, and "
                    "those of prompts.",
                    unit=PanelUnit.COUNT,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=_per_step(_OUTPUT, _ENGINE, "llmservice"), legend="output tokens"
                        ),
                        Query(
                            expr=f"clamp_min({_per_step(_SCHEDULED, _ENGINE, 'llmservice')}\n-\n"
                            f"{_per_step(_OUTPUT, _ENGINE, 'llmservice')}, 0)",
                            legend="prompt tokens",
                        ),
                    ),
                ),
                Panel(
                    title="KV cache",
                    note="Share of the KV blocks of each engine that requests use.",
                    unit=PanelUnit.SHARE,
                    largest=1,
                    queries=(
                        Query(
                            expr=_kv_usage(_ENGINE, "pod"),
                            legend="{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    title="Queue",
                    note="Requests of all engines, and requests without an outcome at the routers.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(
                            expr=f"sum ({_of_any_server('running_requests', _ENGINE)})",
                            legend="running",
                        ),
                        Query(
                            expr=f"sum ({_of_any_server('waiting_requests', _ENGINE)})",
                            legend="waiting",
                        ),
                        Query(
                            expr=f"sum ({METRIC_ROUTER_IN_FLIGHT}{{{_SERVICE}}})",
                            legend="in flight at routers",
                            dashed=True,
                        ),
                    ),
                ),
                Panel(
                    title="Preemptions",
                    note="Requests preempted because of a lack of KV blocks.",
                    unit=PanelUnit.PER_SECOND,
                    queries=(
                        Query(
                            expr="sum by (pod) "
                            f"({_of_any_server('preemptions', _ENGINE, rates=True)})",
                            legend="{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    title="Tokens lost to preemptions",
                    note="Tokens per second that are computed again or copied to host memory.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(
                            expr=f"sum ({_rate(METRIC_RECOMPUTED_TOKENS, _ENGINE)})",
                            legend="computed again",
                        ),
                        Query(
                            expr=f"sum ({_rate(METRIC_SWAPPED_TOKENS, _ENGINE)})", legend="copied"
                        ),
                    ),
                ),
                Panel(
                    title="Tokens per second",
                    note="Output tokens that routers forwarded, by class, and tokens that engines "
                    "computed.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(
                            expr=f"{_BY_CLASS} ({_rate(METRIC_ROUTER_OUTPUT_TOKENS, _SERVICE)})",
                            legend="{{slo_class}}",
                        ),
                        Query(
                            expr=f"sum ({_SCHEDULED})", legend="computed by engines", dashed=True
                        ),
                    ),
                ),
                Panel(
                    title="Prefix cache",
                    note="Share of the prompt tokens that were found in the prefix cache.",
                    unit=PanelUnit.SHARE,
                    largest=1,
                    queries=(
                        Query(
                            expr=f"sum ({_rate(METRIC_PREFIX_HIT, _ENGINE)})\n/\n"
                            f"(sum ({_rate(METRIC_PREFIX_QUERIED, _ENGINE)}) > 0)",
                            legend="hits",
                        ),
                    ),
                ),
                Panel(
                    title="CPU of the processes",
                    note="CPU cores that routers and engines use.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(
                            expr="sum by (role, pod) (rate(process_cpu_seconds_total"
                            f"[{_RECENT}]) * {_PROCESS})",
                            legend="{{role}} {{pod}}",
                        ),
                    ),
                ),
                Panel(
                    title="Memory of the processes",
                    note="Resident memory of routers and engines.",
                    unit=PanelUnit.BYTES,
                    queries=(
                        Query(
                            expr=f"sum by (role, pod) (process_resident_memory_bytes * {_PROCESS})",
                            legend="{{role}} {{pod}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Candidate beside baseline",
            panels=(
                Panel(
                    title="Gate",
                    note="The latest gate of the service, with its phase and the verdict so far.",
                    unit=PanelUnit.COUNT,
                    look=Look.TABLE,
                    gate=True,
                    empty="no gate",
                    queries=(
                        Query(
                            # The label is empty before the first pair of runs.
                            expr=f"label_replace({METRIC_SERVICE_GATE}{{{_SERVICE}}}, "
                            '"verdict", "no verdict", "verdict", "")',
                            legend="{{revision}} {{phase}} {{verdict}}",
                        ),
                    ),
                ),
                Panel(
                    title="Step time of the pair",
                    note="Mean device time of a step on the engines of a gated rollout, which "
                    "serve no clients.",
                    unit=PanelUnit.SECONDS,
                    gate=True,
                    empty="no gate of Goodput's engines in this time range",
                    queries=(
                        Query(
                            expr=f"sum by (role) ({_rate(METRIC_STEP_SECONDS + '_sum', _OF_PAIR)})"
                            "\n/\n(sum by (role) "
                            f"({_rate(METRIC_STEP_SECONDS + '_count', _OF_PAIR)}) > 0)",
                            legend="{{role}}",
                        ),
                    ),
                ),
                Panel(
                    title="Output tokens of the pair",
                    note="Output tokens per second of candidate and baseline.",
                    unit=PanelUnit.COUNT,
                    gate=True,
                    empty=_NO_PAIR,
                    queries=(
                        Query(
                            expr="sum by (role) "
                            f"({_of_any_server('output_tokens', _OF_PAIR, rates=True)})",
                            legend="{{role}}",
                        ),
                    ),
                ),
                Panel(
                    title="Queue of the pair",
                    note="Running and waiting requests of candidate and baseline.",
                    unit=PanelUnit.COUNT,
                    gate=True,
                    empty=_NO_PAIR,
                    queries=(
                        Query(
                            expr=f"sum by (role) ({_of_any_server('running_requests', _OF_PAIR)})",
                            legend="{{role}} running",
                        ),
                        Query(
                            expr=f"sum by (role) ({_of_any_server('waiting_requests', _OF_PAIR)})",
                            legend="{{role}} waiting",
                            dashed=True,
                        ),
                    ),
                ),
                Panel(
                    title="KV cache of the pair",
                    note="Share of the KV blocks that requests use.",
                    unit=PanelUnit.SHARE,
                    largest=1,
                    gate=True,
                    empty=_NO_PAIR,
                    queries=(Query(expr=_kv_usage(_OF_PAIR, "role"), legend="{{role}}"),),
                ),
            ),
        ),
    ),
)

_ALL: Final = 'namespace=~"$namespace"'

FLEET: Final = DashboardSpec(
    uid="goodput-services",
    title="Goodput / all services",
    note="Attainment, goodput and replicas of all LLMServices, and the operator.",
    rows=(
        Row(
            title="Services",
            panels=(
                Panel(
                    title="Services that miss an objective",
                    note="Services whose condition SLOAttained is false.",
                    unit=PanelUnit.COUNT,
                    look=Look.TABLE,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_CONDITION}"
                            f'{{{_ALL},condition="SLOAttained",status="False"}} == 1',
                            legend="{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    title="Attainment below the objective",
                    note="Attainment of the last hour minus the objective, worst first; negative "
                    "if the objective is missed.",
                    unit=PanelUnit.SHARE,
                    look=Look.TABLE,
                    queries=(
                        Query(
                            expr=f"sort({_attained(_ALL, '1h', _BY_SERVICE_CLASS)}\n-\n"
                            f"max by (namespace, llmservice, slo_class) "
                            f"({METRIC_SERVICE_OBJECTIVE}{{{_ALL}}}))",
                            legend="{{namespace}}/{{llmservice}} {{slo_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="Goodput",
                    note="Requests per second that met all targets of their class.",
                    unit=PanelUnit.PER_SECOND,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=f"{_BY_SERVICE} ({_rate(METRIC_REQUESTS, _ALL + _GOOD)})",
                            legend="{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    title="Misses",
                    note="Requests per second that missed a target, were refused or failed.",
                    unit=PanelUnit.PER_SECOND,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=f"{_BY_SERVICE} ("
                            + _rate(METRIC_REQUESTS, _ALL + _NOT_GOOD)
                            + ")",
                            legend="{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    title="Burn rate over an hour",
                    note="Misses in units of those that the objective permits.",
                    unit=PanelUnit.COUNT,
                    limits=(14.4,),
                    queries=(
                        Query(
                            expr=_burn(_ALL, "1h", _BY_SERVICE_CLASS),
                            legend="{{namespace}}/{{llmservice}} {{slo_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="Replicas",
                    note="Engine pods of each service.",
                    unit=PanelUnit.COUNT,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_REPLICAS}{{{_ALL}}}",
                            legend="{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    title="Replicas at their bound",
                    note="Requested replicas over spec.maxReplicas.",
                    unit=PanelUnit.SHARE,
                    largest=1,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_DESIRED_REPLICAS}{{{_ALL}}}\n/\n"
                            f"{METRIC_SERVICE_MAX_REPLICAS}{{{_ALL}}}",
                            legend="{{namespace}}/{{llmservice}}",
                        ),
                    ),
                ),
                Panel(
                    title="Conditions that need attention",
                    note="Services that are stalled or limited in scaling, or not ready.",
                    unit=PanelUnit.COUNT,
                    look=Look.TABLE,
                    queries=(
                        Query(
                            expr=f"{METRIC_SERVICE_CONDITION}"
                            f'{{{_ALL},condition=~"Stalled|ScalingLimited|RolloutPaused",'
                            'status="True"} == 1\nor\n'
                            f"{METRIC_SERVICE_CONDITION}"
                            f'{{{_ALL},condition="Ready",status="False"}} == 1',
                            legend="{{namespace}}/{{llmservice}} {{condition}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Operator",
            panels=(
                Panel(
                    title="Leaders and versions",
                    note="Operators that hold the Lease, and running processes by version.",
                    unit=PanelUnit.COUNT,
                    look=Look.NUMBERS,
                    queries=(
                        Query(expr=f"sum ({METRIC_OPERATOR_LEADER})", legend="leaders"),
                        Query(
                            expr=f"count by (role, version) ({METRIC_BUILD_INFO})",
                            legend="{{role}} {{version}}",
                        ),
                    ),
                ),
                Panel(
                    title="Work queue",
                    note="Services that wait for a reconciliation, and how long the first of "
                    "them has been due.",
                    unit=PanelUnit.COUNT,
                    queries=(
                        Query(expr=f"max ({METRIC_OPERATOR_WAITING})", legend="waiting services"),
                        Query(expr=f"max ({METRIC_OPERATOR_OVERDUE})", legend="seconds overdue"),
                    ),
                ),
                Panel(
                    title="Reconciliations",
                    note="Ended reconciliations by outcome.",
                    unit=PanelUnit.PER_SECOND,
                    queries=(
                        Query(
                            expr=f"sum by (outcome) (rate({METRIC_OPERATOR_TURNS}[{_RECENT}]))",
                            legend="{{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="Duration of reconciliations",
                    note="Exact to the buckets of the histogram.",
                    unit=PanelUnit.SECONDS,
                    queries=tuple(
                        Query(
                            expr=f"histogram_quantile({share}, sum by (le) "
                            f"(rate({METRIC_OPERATOR_TURN_SECONDS}_bucket[{_RECENT}])))",
                            legend=f"p{share * 100:.0f}",
                        )
                        for share in (0.5, 0.99)
                    ),
                ),
                Panel(
                    title="Calls to the API server",
                    note="By HTTP status; 0 without a response. Watches are not counted.",
                    unit=PanelUnit.PER_SECOND,
                    look=Look.STACKED,
                    queries=(
                        Query(
                            expr=f"sum by (status) (rate({METRIC_OPERATOR_CALLS}[{_RECENT}]))",
                            legend="{{status}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
