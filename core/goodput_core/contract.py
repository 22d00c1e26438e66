"""Names that cross a process boundary: metrics, HTTP paths, headers, environment, CRD group.

Components that must agree on a string import it from here. Renaming a value is a breaking change
for dashboards, manifests and running fleets.
"""

from __future__ import annotations

from typing import Final

# --- distribution ---------------------------------------------------------------------------
# `goodput` on PyPI is another project.
DISTRIBUTION: Final = "goodput-llm"

# --- custom resources ---------------------------------------------------------------------
CRD_GROUP: Final = "goodput.dev"
CRD_VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{CRD_GROUP}/{CRD_VERSION}"
KIND_LLMSERVICE: Final = "LLMService"
PLURAL_LLMSERVICE: Final = "llmservices"
KIND_TRACEREPLAY: Final = "TraceReplay"
PLURAL_TRACEREPLAY: Final = "tracereplays"

# --- labels, annotations and port names of objects in a cluster ------------------------------
OBJECT_LABEL_LLMSERVICE: Final = f"{CRD_GROUP}/llmservice"
OBJECT_LABEL_TRACEREPLAY: Final = f"{CRD_GROUP}/tracereplay"
# On an LLMService, by its author: "false" if it serves no clients, so that replays may load it.
OBJECT_LABEL_PRODUCTION: Final = f"{CRD_GROUP}/production"
OBJECT_LABEL_REVISION: Final = f"{CRD_GROUP}/revision"
OBJECT_LABEL_ROLE: Final = f"{CRD_GROUP}/role"
# On the objects of a gate: a digest of the compared revisions and of the gate's rules.
OBJECT_LABEL_GATE: Final = f"{CRD_GROUP}/gate"
# On a ControllerRevision: progress and outcome of its gate.
ANNOTATION_GATE: Final = f"{CRD_GROUP}/gate"
# On an LLMService, by its author: a new value repeats the gate of a rejected or paused revision.
ANNOTATION_RETRY: Final = f"{CRD_GROUP}/retry"
# On a child object: a digest of the applied fields, to detect fields that were removed.
ANNOTATION_APPLIED: Final = f"{CRD_GROUP}/applied"
# On a pod of another server than Goodput's engine: the kind of its runtime; and the port and path
# of its metrics (":8000/metrics"), if it has any.
ANNOTATION_RUNTIME: Final = f"{CRD_GROUP}/runtime"
ANNOTATION_METRICS: Final = f"{CRD_GROUP}/metrics"
# On a pod of a service: the uid of the service. A service that is deleted and created again has
# other pods than the earlier service of its name, some of which may still end.
ANNOTATION_SERVICE_UID: Final = f"{CRD_GROUP}/llmservice-uid"
# Ports of engines and routers, in Services and in the EndpointSlices that routers read.
PORT_NAME_SERVING: Final = "http"
PORT_NAME_ADMIN: Final = "admin"
# Folder of an engine's pod in which pvc://CLAIM/PATH is mounted as CLAIM.
FOLDER_CLAIMS: Final = "/var/lib/goodput/claims"
# Folder of an engine's pod for downloaded weights.
FOLDER_WEIGHTS: Final = "/var/cache/goodput"

# --- HTTP: serving port -------------------------------------------------------------------
PATH_COMPLETIONS: Final = "/v1/completions"
PATH_CHAT_COMPLETIONS: Final = "/v1/chat/completions"
PATH_MODELS: Final = "/v1/models"
PATH_LIVE: Final = "/health/live"
PATH_READY: Final = "/health/ready"
# Paths of other servers that return 200 once they serve, in the order in which a router tries them.
FOREIGN_HEALTH_PATHS: Final = ("/health", PATH_MODELS)

# --- HTTP: admin port ---------------------------------------------------------------------
PATH_METRICS: Final = "/metrics"
PATH_CONTROL_STATE: Final = "/control/state"
QUERY_SECONDS_SINCE: Final = "seconds_since"
"""Query of a router's state: it adds the per-second counts from this second of its clock on."""
PATH_CONTROL_LIMITS: Final = "/control/limits"
# Bound of the `revision` of limits, which rises with each change; large enough for nanoseconds.
MAX_LIMITS_REVISION: Final = 2**63 - 1
# `tokenizer` in an engine's /control/state if a router can count tokens as the engine does, which
# holds for emulated devices.
TOKENIZER_EMULATED: Final = "emulated"
TOKENIZER_MODEL: Final = "model"

# --- HTTP: port of the operator --------------------------------------------------------------
# The services with the addresses of their pods, for `replay watch --services`.
PATH_SERVICES: Final = "/services"

# --- HTTP: port of an armed shard of a replay ------------------------------------------------
PATH_REPLAY_STATE: Final = "/replay/state"
PATH_REPLAY_START: Final = "/replay/start"

# --- HTTP: port of a comparison by `replay ab` -------------------------------------------------
PATH_GATE_STATE: Final = "/gate/state"

# --- HTTP headers, request ----------------------------------------------------------------
HEADER_REQUEST_ID: Final = "X-Request-Id"
HEADER_SLO_CLASS: Final = "X-SLO-Class"
HEADER_SLO_TTFT_MS: Final = "X-SLO-TTFT-Ms"
HEADER_SLO_TPOT_MS: Final = "X-SLO-TPOT-Ms"
HEADER_SLO_E2E_MS: Final = "X-SLO-E2E-Ms"
HEADER_PRIORITY: Final = "X-Priority"
# The true output length of a replayed row. The HTTP server passes it to the executor alone: no
# policy may see it.
HEADER_OUTPUT_TOKENS: Final = "X-Goodput-Output-Tokens"

# --- HTTP headers, response ---------------------------------------------------------------
HEADER_TIMINGS: Final = "X-Goodput-Timings"
HEADER_REPLICA: Final = "X-Goodput-Replica"
HEADER_REVISION: Final = "X-Goodput-Revision"
# A replica's load as JSON, with the names of GET /control/state: running, waiting, max_waiting,
# kv_free_blocks, kv_total_blocks, saturated, draining. The router reads and removes it.
HEADER_LOAD: Final = "X-Goodput-Load"
# `owned_by` of Goodput's models in /v1/models: a client may pin lengths of these by header.
MODEL_OWNER: Final = "goodput"

# --- environment --------------------------------------------------------------------------
ENV_DEBUG: Final = "GOODPUT_DEBUG"
# Folder of downloads and conversions; ~/.cache/goodput without it.
ENV_CACHE: Final = "GOODPUT_CACHE"
ENV_CONTROL_TOKEN: Final = "GOODPUT_CONTROL_TOKEN"  # noqa: S105 - a variable's name
ENV_LLMSERVICE: Final = "GOODPUT_LLMSERVICE"
ENV_REPLICA: Final = "GOODPUT_REPLICA"
ENV_REVISION: Final = "GOODPUT_REVISION"
# The Hub's name or the folder of the weights, in pods of another server.
ENV_MODEL: Final = "GOODPUT_MODEL"
# The number of a pod of an Indexed Job, from 0, which Kubernetes sets.
ENV_COMPLETION_INDEX: Final = "JOB_COMPLETION_INDEX"
# The options of `goodput operator`, since `kopf run` passes none on.
ENV_OPERATOR_OPTIONS: Final = "GOODPUT_OPERATOR_OPTIONS"

# --- metric labels ------------------------------------------------------------------------
LABEL_LLMSERVICE: Final = "llmservice"
LABEL_REVISION: Final = "revision"
LABEL_ROLE: Final = "role"
LABEL_SLO_CLASS: Final = "slo_class"
LABEL_OUTCOME: Final = "outcome"
LABEL_REASON: Final = "reason"
# METRIC_KV_BLOCKS: used, cached (free, but holding a reusable prefix) or empty.
# METRIC_HOST_KV_BLOCKS: used or empty.
LABEL_KV_STATE: Final = "state"
ROLE_ENGINE: Final = "engine"
ROLE_ROUTER: Final = "router"
ROLE_REPLAY: Final = "replay"
# The engines of a gate, which serve no clients.
ROLE_CANDIDATE: Final = "candidate"
ROLE_BASELINE: Final = "baseline"
ROLE_OPERATOR: Final = "operator"
LABEL_VERSION: Final = "version"
# 1; of engines, routers and the operator, with the version of Goodput.
METRIC_BUILD_INFO: Final = "goodput_build_info"

# --- metrics of the router: the source of measured attainment ------------------------------
# One increment per client request. `outcome` is one of CLIENT_OUTCOMES.
METRIC_REQUESTS: Final = "goodput_requests_total"
# attained + missed + shed + error + timeout is the denominator of attainment. Not counted there:
# `cancelled` (the client left before its TTFT target had passed) and `unjudged` (a response that
# was not streamed and has no timings, from a foreign engine).
CLIENT_OUTCOMES: Final = (
    "attained",
    "missed",
    "shed",
    "error",
    "timeout",
    "cancelled",
    "unjudged",
)
# Results of TTFT and TPOT apart, for the control laws; a request may be counted in both.
METRIC_PROMISES: Final = "goodput_promises_total"
LABEL_PROMISE: Final = "promise"
LABEL_RESULT: Final = "result"
PROMISES: Final = ("ttft", "tpot")
# `close`: met with less than a fifth of the target to spare.
PROMISE_RESULTS: Final = ("kept", "close", "missed")
# Missed requests by reason; a request that missed several targets is counted once for each.
METRIC_MISSES: Final = "goodput_misses_total"
MISSED_TARGETS: Final = ("ttft", "tpot", "tbt", "e2e")
METRIC_TTFT: Final = "goodput_request_ttft_seconds"
METRIC_TPOT: Final = "goodput_request_tpot_seconds"
METRIC_E2E: Final = "goodput_request_e2e_seconds"
METRIC_TBT: Final = "goodput_request_tbt_seconds"
METRIC_ROUTER_OUTPUT_TOKENS: Final = "goodput_router_output_tokens_total"
METRIC_ROUTER_PROMPT_TOKENS: Final = "goodput_router_prompt_tokens_total"
METRIC_ROUTER_IN_FLIGHT: Final = "goodput_router_in_flight_requests"
METRIC_ROUTER_ARRIVALS: Final = "goodput_router_arrivals_total"
METRIC_ROUTER_RETRIES: Final = "goodput_router_retries_total"
METRIC_ROUTER_REPLICA_UP: Final = "goodput_router_replica_ready"
LABEL_REPLICA: Final = "replica"
# Invalid requests (4xx other than 429), which are not counted as outcomes.
METRIC_ROUTER_CLIENT_ERRORS: Final = "goodput_router_client_errors_total"
LABEL_STATUS: Final = "status"
# Requests by tenant. Only the first tenants of the file have series of their own.
METRIC_TENANT_REQUESTS: Final = "goodput_router_tenant_requests_total"
METRIC_TENANT_THROTTLED: Final = "goodput_router_tenant_throttled_total"
METRIC_TENANT_PROMPT_TOKENS: Final = "goodput_router_tenant_prompt_tokens_total"
METRIC_TENANT_OUTPUT_TOKENS: Final = "goodput_router_tenant_output_tokens_total"
METRIC_TENANT_WEIGHT: Final = "goodput_router_tenant_weight"
LABEL_TENANT: Final = "tenant"

# Bucket bounds in seconds: OpenTelemetry's gen_ai buckets, finer near usual targets. The router and
# the replayer share them, so that their histograms can be compared.
BUCKETS_TTFT_S: Final = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300,
)  # fmt: skip
BUCKETS_TPOT_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
BUCKETS_E2E_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1, 1.5, 2.5, 4, 6, 10, 15, 20, 30, 45, 60, 90,
    120, 180, 300, 600,
)  # fmt: skip

# --- metrics of the engine ----------------------------------------------------------------
METRIC_CORE_RESTARTS: Final = "goodput_engine_core_restarts_total"
METRIC_STEPS: Final = "goodput_engine_steps_total"
METRIC_STEP_SECONDS: Final = "goodput_engine_step_seconds"
METRIC_SCHEDULED_TOKENS: Final = "goodput_engine_scheduled_tokens_total"
METRIC_OUTPUT_TOKENS: Final = "goodput_engine_output_tokens_total"
METRIC_RUNNING: Final = "goodput_engine_running_requests"
METRIC_WAITING: Final = "goodput_engine_waiting_requests"
METRIC_KV_BLOCKS: Final = "goodput_engine_kv_blocks"
METRIC_PREEMPTIONS: Final = "goodput_engine_preemptions_total"
METRIC_RECOMPUTED_TOKENS: Final = "goodput_engine_recomputed_tokens_total"
METRIC_SWAPPED_TOKENS: Final = "goodput_engine_swapped_tokens_total"
METRIC_HOST_KV_BLOCKS: Final = "goodput_engine_host_kv_blocks"
METRIC_PREFIX_QUERIED: Final = "goodput_engine_prefix_queried_tokens_total"
METRIC_PREFIX_HIT: Final = "goodput_engine_prefix_hit_tokens_total"
METRIC_SHED: Final = "goodput_engine_shed_total"
METRIC_PREDICTED_LENGTHS: Final = "goodput_engine_predicted_lengths_total"
METRIC_LENGTH_ERROR: Final = "goodput_engine_length_error_log_ratio"
METRIC_TOKEN_BUDGET: Final = "goodput_engine_token_budget"  # noqa: S105 - tokens of a model
METRIC_MAX_NUM_SEQS: Final = "goodput_engine_max_num_seqs"
METRIC_SAFETY: Final = "goodput_engine_safety_ratio"
METRIC_STEP_TIME_ERROR: Final = "goodput_engine_step_time_error_ratio"

# --- metrics of the operator ----------------------------------------------------------------
METRIC_OPERATOR_LEADER: Final = "goodput_operator_leader"
METRIC_OPERATOR_WAITING: Final = "goodput_operator_waiting_services"
METRIC_OPERATOR_OVERDUE: Final = "goodput_operator_overdue_seconds"
METRIC_OPERATOR_TURNS: Final = "goodput_operator_turns_total"
METRIC_OPERATOR_TURN_SECONDS: Final = "goodput_operator_turn_seconds"
# Labels: verb and kind as in RBAC, HTTP status (0 without a response).
METRIC_OPERATOR_CALLS: Final = "goodput_operator_api_calls_total"
# Spec, status and decisions of a service, by namespace and llmservice.
METRIC_SERVICE_OBJECTIVE: Final = "goodput_service_objective_ratio"
METRIC_SERVICE_TARGET: Final = "goodput_service_target_seconds"
METRIC_SERVICE_ATTAINMENT: Final = "goodput_service_attainment_ratio"
METRIC_SERVICE_ATTAINMENT_LOWER: Final = "goodput_service_attainment_lower_ratio"
METRIC_SERVICE_ATTAINMENT_UPPER: Final = "goodput_service_attainment_upper_ratio"
# 1 for the status of the condition, 0 for the two others.
METRIC_SERVICE_CONDITION: Final = "goodput_service_condition"
LABEL_CONDITION: Final = "condition"
# 1; the reason of each condition.
METRIC_SERVICE_CONDITION_REASON: Final = "goodput_service_condition_reason"
METRIC_SERVICE_DESIRED_REPLICAS: Final = "goodput_service_desired_replicas"
METRIC_SERVICE_MIN_REPLICAS: Final = "goodput_service_min_replicas"
METRIC_SERVICE_MAX_REPLICAS: Final = "goodput_service_max_replicas"
METRIC_SERVICE_MIN_TOKEN_BUDGET: Final = "goodput_service_min_token_budget"  # noqa: S105
METRIC_SERVICE_MAX_TOKEN_BUDGET: Final = "goodput_service_max_token_budget"  # noqa: S105
METRIC_SERVICE_STARTUP: Final = "goodput_service_startup_seconds"
# 1; the latest gate, with the fields of `status.gate`. `verdict` is that so far, or empty.
METRIC_SERVICE_GATE: Final = "goodput_service_gate"
LABEL_PHASE: Final = "phase"
# 1; `use` is one of REVISION_USES.
METRIC_SERVICE_REVISION: Final = "goodput_service_revision"
LABEL_USE: Final = "use"
REVISION_USES: Final = ("current", "update", "failed")
METRIC_SERVICE_REPLICAS: Final = "goodput_service_replicas"
METRIC_SERVICE_READY_REPLICAS: Final = "goodput_service_ready_replicas"
METRIC_SERVICE_RECOMMENDED_REPLICAS: Final = "goodput_service_recommended_replicas"
METRIC_SERVICE_TOKEN_BUDGET: Final = "goodput_service_token_budget"  # noqa: S105 - as above
# More labels: knob and reason as in a service's status, applied true or false.
METRIC_SERVICE_DECISION_TIME: Final = "goodput_service_decision_timestamp_seconds"
LABEL_KNOB: Final = "knob"
LABEL_APPLIED: Final = "applied"
METRIC_SERVICE_DECISIONS: Final = "goodput_service_decisions_total"

# --- metrics of a replay, of its window until now ---------------------------------------------
METRIC_REPLAY_PLANNED: Final = "goodput_replay_planned_requests"
METRIC_REPLAY_SENT: Final = "goodput_replay_sent_requests_total"
METRIC_REPLAY_IN_FLIGHT: Final = "goodput_replay_in_flight_requests"
# `outcome` as in the records of a run.
METRIC_REPLAY_REQUESTS: Final = "goodput_replay_requests_total"
# `result`: attained or missed.
METRIC_REPLAY_JUDGED: Final = "goodput_replay_judged_requests_total"
# A request with several reasons counts for each of them.
METRIC_REPLAY_MISSES: Final = "goodput_replay_misses_total"
METRIC_REPLAY_ATTAINMENT: Final = "goodput_replay_attainment_ratio"
METRIC_REPLAY_ATTAINMENT_LOWER: Final = "goodput_replay_attainment_lower_ratio"
METRIC_REPLAY_ATTAINMENT_UPPER: Final = "goodput_replay_attainment_upper_ratio"
METRIC_REPLAY_OBJECTIVE: Final = "goodput_replay_objective_ratio"
METRIC_REPLAY_GOODPUT: Final = "goodput_replay_goodput_requests_per_second"
METRIC_REPLAY_TTFT: Final = "goodput_replay_ttft_seconds"
METRIC_REPLAY_TPOT: Final = "goodput_replay_tpot_seconds"
METRIC_REPLAY_E2E: Final = "goodput_replay_e2e_seconds"
METRIC_REPLAY_LAG: Final = "goodput_replay_send_lag_seconds"
METRIC_REPLAY_LAG_LIMIT: Final = "goodput_replay_send_lag_p99_limit_seconds"
METRIC_REPLAY_LOOP_LAG_P99: Final = "goodput_replay_loop_lag_p99_seconds"
METRIC_REPLAY_LOOP_LAG_MAX: Final = "goodput_replay_loop_lag_max_seconds"
METRIC_REPLAY_ELAPSED: Final = "goodput_replay_elapsed_seconds"
# 1 for the verdict so far, 0 for the others.
METRIC_REPLAY_VERDICT: Final = "goodput_replay_verdict"
LABEL_VERDICT: Final = "verdict"

# --- lines on stdout that another process reads ------------------------------------
# `goodput engine --json` and `goodput router --json` print exactly one line when they listen:
# {"event": "listening", "url": ..., "admin_url": ...}. `goodput up --json` prints
# {"event": "ready", "url": ..., "admin_url": ..., "replicas": [...]} when traffic may start, and
# {"event": "decision", "decision": {...}} for each decision of the control laws. Before that, it
# prints {"event": "fetching", "line": ...} while weights are downloaded or converted.
EVENT_LISTENING: Final = "listening"
EVENT_READY: Final = "ready"
EVENT_DECISION: Final = "decision"
EVENT_FETCHING: Final = "fetching"
