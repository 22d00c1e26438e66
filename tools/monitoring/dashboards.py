"""Grafana's JSON of the dashboards, made with Grafana's own SDK."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from tools.monitoring.panels import Look, PanelUnit

from goodput_core.contract import (
    METRIC_SERVICE_CONDITION,
    METRIC_SERVICE_DECISION_TIME,
)

if TYPE_CHECKING:
    from tools.monitoring.panels import DashboardSpec, Panel

__all__ = ["TAG", "render_dashboard"]

TAG: Final = "goodput"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TARGET_LABELS: Final = ("container", "endpoint", "instance", "job", "pod", "prometheus", "service")
_HEIGHT: Final = 8
_WIDTH: Final = 8
"""Three panels side by side."""


def render_dashboard(spec: DashboardSpec) -> str:
    """Return the JSON of a dashboard."""
    builder = (
        dashboard.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.note)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .editable()
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("data source").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("Goodput")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .as_dropdown(True)
        )
    )
    namespaces = f"label_values({METRIC_SERVICE_CONDITION}, namespace)"
    namespace = _variable("namespace", namespaces)
    if spec.of_service:
        names = f'label_values({METRIC_SERVICE_CONDITION}{{namespace="$namespace"}}, llmservice)'
        builder = builder.with_variable(namespace).with_variable(_variable("llmservice", names))
    else:
        builder = builder.with_variable(namespace.multi(True).include_all(True).all_value(".+"))
    for row in spec.rows:
        builder = builder.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel))
    model = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    if spec.of_service:
        model["annotations"] = {"list": [_decisions()]}
    return json.dumps(model, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _decisions() -> dict[str, Any]:
    """Return the query that marks decisions at their own times.

    The SDK's class lacks the fields of a Prometheus data source.
    """
    metric = f'{METRIC_SERVICE_DECISION_TIME}{{namespace="$namespace",llmservice="$llmservice"}}'
    return {
        "name": "Decisions",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "iconColor": "purple",
        "expr": f"{metric} * 1000",
        "useValueForTime": True,
        "step": "30s",
        "titleFormat": "{{knob}}",
        "textFormat": "{{reason}}, applied: {{applied}}",
        "tagKeys": "knob,reason",
    }


def _panel(panel: Panel) -> Any:
    builder: Any = _FACTORIES[panel.look](panel)
    numbers = panel.look in {Look.NUMBERS, Look.TABLE}
    builder = (
        builder.title(panel.title)
        .description(panel.note)
        .datasource(_SOURCE)
        .unit(panel.unit.value)
        .height(_HEIGHT)
        .span(_WIDTH)
    )
    if panel.largest is not None:
        builder = builder.max(panel.largest)
    if panel.empty is not None:
        builder = builder.no_value(panel.empty)
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
        if numbers:
            target = target.instant()
        if panel.look is Look.TABLE:
            target = target.format(PromQueryFormat.TABLE)
        builder = builder.with_target(target)
        if query.dashed and panel.look is Look.LINES:
            dashes = {"fill": "dash", "dash": [8, 8]}
            style = [
                DynamicConfigValue(id_val="custom.lineStyle", value=dashes),
                DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            ]
            builder = builder.override_by_query(chr(ord("A") + number), style)
    return builder


def _lines(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    builder = timeseries.Panel().legend(legend).min(0).fill_opacity(0)
    if panel.limits:
        steps = [Threshold(value=None, color="green")]
        steps += [Threshold(value=limit, color="red") for limit in sorted(panel.limits)]
        thresholds = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
        style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        builder = builder.thresholds(thresholds).thresholds_style(style)
    return builder


def _stacked(panel: Panel) -> Any:
    stacking = common.StackingConfig().mode(StackingMode.NORMAL)
    return _lines(panel).stacking(stacking).fill_opacity(30)


def _numbers(_: Panel) -> Any:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(reduced)


def _table(panel: Panel) -> Any:
    hidden = {*_TARGET_LABELS, "Time", "__name__"}
    if any("$llmservice" in one.expr for one in panel.queries):
        hidden |= {"namespace", "llmservice"}
    if panel.unit is PanelUnit.COUNT:
        hidden.add("Value")
    excluded = dict.fromkeys(sorted(hidden), True)
    options = {"excludeByName": excluded, "renameByName": {"Value": panel.title}}
    return table.Panel().with_transformation(
        DataTransformerConfig(id_val="organize", options=options)
    )


_FACTORIES: Final = {
    Look.LINES: _lines,
    Look.STACKED: _stacked,
    Look.NUMBERS: _numbers,
    Look.TABLE: _table,
}
