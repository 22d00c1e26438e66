"""Import spans of GenAI calls from OpenTelemetry, as the Collector's file exporter writes them.

Source: the semantic conventions for GenAI spans, and OTLP's JSON encoding, one batch of spans per
line. Attributes of earlier versions of the conventions, which vLLM and SGLang emit, are read, too.
Spans are exported when they end, so their order in the file is not that of the arrivals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from goodput_traces.format.schema import COLUMN_NS
from goodput_traces.importers.column_map import ARRIVAL, SourceColumn
from goodput_traces.importers.log import FixedLogImporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_traces.format.schema import TraceRow
    from goodput_traces.importers.base import ImportOptions
    from goodput_traces.importers.record import Record

__all__ = ["OtelImporter"]

_INPUT: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
# Other operations either do not generate tokens or contain the spans of these.
_OPERATIONS: Final = frozenset({"chat", "generate_content", "text_completion"})
_START: Final = "startTimeUnixNano"
_END: Final = "endTimeUnixNano"
_VALUE_KINDS: Final = ("stringValue", "intValue", "doubleValue", "boolValue")
_SHOWN: Final = 5


class OtelImporter(FixedLogImporter):
    """Importer of OTLP JSON lines: a request for each span with token counts."""

    name: ClassVar[str] = "otel"
    summary: ClassVar[str] = (
        "OpenTelemetry GenAI spans: resourceSpans (the Collector's file exporter)"
    )
    required_columns: ClassVar[frozenset[str]] = frozenset({"resourceSpans"})
    read_columns = required_columns
    sources: ClassVar[Mapping[str, SourceColumn]] = {
        ARRIVAL: SourceColumn(names=("startTimeUnixNano",), unit="ns"),
        "input_tokens": SourceColumn(names=_INPUT),
        "output_tokens": SourceColumn(names=_OUTPUT),
        "request_id": SourceColumn(names=("span", "gen_ai.request.id")),
        "max_output_tokens": SourceColumn(names=("gen_ai.request.max_tokens",)),
        "provided_session_id": SourceColumn(names=("gen_ai.conversation.id", "session.id")),
        "duration_ttft_ms": SourceColumn(names=("gen_ai.latency.time_to_first_token",), unit="s"),
        "duration_e2e_ms": SourceColumn(names=("duration",), unit="ns"),
        "model_name": SourceColumn(names=("gen_ai.request.model", "gen_ai.response.model")),
        "request_type": SourceColumn(names=("gen_ai.operation.name",)),
    }
    sorts = True

    def __init__(self, options: ImportOptions) -> None:
        super().__init__(options)
        self._without_tokens = 0
        self._span_names: Counter[str] = Counter()
        self._other_operations: Counter[str] = Counter()

    def convert(self, record: Record) -> Iterator[TraceRow]:
        """Convert a batch of spans to requests."""
        for batch in _objects(record, "resourceSpans"):
            resource = batch.values.get("resource")
            shared = {} if resource is None else _attributes(batch.nested("resource", resource))
            for scope in _objects(batch, "scopeSpans"):
                for span in _objects(scope, "spans"):
                    yield from self._convert_span(span, shared)

    def notes(self) -> list[str]:
        """Return the notes of every importer, and notes about spans."""
        notes = super().notes()
        if self._without_tokens:
            notes.append(f"{self._without_tokens:,} GenAI spans without token counts were skipped")
        if self._other_operations:
            counts = _list_counts(self._other_operations)
            notes.append(
                f"spans of operations that contain no single request were skipped: {counts}"
            )
        if len(self._span_names) > 1:
            notes.append(
                f"requests by span name: {_list_counts(self._span_names)}; if several spans record "
                "the same request, select one of them, for example with --only name=llm_request"
            )
        return notes

    def _convert_span(self, span: Record, shared: Mapping[str, Any]) -> Iterator[TraceRow]:
        values = {**shared, **_attributes(span)}
        operation = values.get("gen_ai.operation.name")
        if not all(any(name in values for name in names) for names in (_INPUT, _OUTPUT)):
            self._without_tokens += operation in _OPERATIONS
            return
        if operation is not None and operation not in _OPERATIONS:
            self._other_operations[str(operation)[:80]] += 1
            return
        name, span_id = span.values.get("name"), span.values.get("spanId")
        values |= {"name": name, _START: span.values.get(_START)}
        if span_id:
            values["span"] = f"{span.values.get('traceId') or ''}/{span_id}"
        start_ns, end_ns = (span.optional_integer(key, COLUMN_NS) for key in (_START, _END))
        if start_ns is not None and end_ns is not None and end_ns >= start_ns:
            values["duration"] = end_ns - start_ns
        for row in self.convert_values(replace(span, values=values)):
            self._span_names[str(name)[:80]] += 1
            yield row


def _objects(record: Record, column: str) -> Iterator[Record]:
    """Yield the objects in a list, as records."""
    values = record.values.get(column) or []
    if not isinstance(values, list):
        record.reject(column, "the value is not a list; correct or remove the line")
    for at, value in enumerate(values):
        yield record.nested(f"{column}[{at}]", value)


def _attributes(record: Record) -> dict[str, Any]:
    """Return the attributes of a span or a resource by name; lists and objects become None."""
    attributes: dict[str, Any] = {}
    for attribute in _objects(record, "attributes"):
        key, value = attribute.values.get("key"), attribute.values.get("value")
        if isinstance(key, str) and isinstance(value, dict):
            kinds = (value.get(kind) for kind in _VALUE_KINDS)
            attributes[key] = next((one for one in kinds if one is not None), None)
    return attributes


def _list_counts(counts: Counter[str]) -> str:
    shown = [f"{name} {count:,}" for name, count in counts.most_common(_SHOWN)]
    return ", ".join(shown) + (", …" if len(counts) > _SHOWN else "")
