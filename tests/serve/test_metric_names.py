"""Every metric has the same name, kind and unit in the code, on the page and on the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_ragged.features.disaggregation.meter import SendMeter
from sgl_ragged.features.history.histories import Histories
from sgl_ragged.features.host_tier.restoring import Restorer
from sgl_ragged.features.retrieval.retriever import Retriever
from sgl_ragged.serve import metrics, start_check
from sgl_ragged.serve.weight_updates import ServedWeights

DOCS = Path(__file__).parents[2] / "docs"
FEATURES = (SendMeter, Histories, Restorer, Retriever, ServedWeights)
GAUGES = metrics._GAUGES | {name: text for name, (_, text) in start_check.GAUGES.items()}
COUNTERS = dict(metrics._COUNTERS)
for feature in FEATURES:
    GAUGES |= feature.gauges
    COUNTERS |= feature.counters

UNITS = {"bytes": "bytes", "ratio": "percentunit"}
"""The dashboard's unit by the word of a gauge's name that says it; others have none."""


def listed() -> dict[str, str]:
    """Kind of each metric in docs/operate.md, by name without the prefix."""
    found: dict[str, str] = {}
    for line in (DOCS / "operate.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`sglang:ragged_"):
            names = re.findall(r"`(?:sglang:ragged|\.\.)_(\w+)`", cells[0])
            for name in names:
                assert name not in found, f"{name} is listed twice"
                found[name] = cells[1]
    return found


def test_the_page_lists_every_metric_with_its_kind():
    known = {**dict.fromkeys(GAUGES, "gauge"), **{f"{name}_total": "counter" for name in COUNTERS}}
    assert listed() == known


def test_the_dashboard_has_the_units_of_the_names():
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            gauge = re.match(r"(?:max\()?sglang:ragged_(\w+)\{", target["expr"])
            if gauge is not None:
                unit = next((unit for word, unit in UNITS.items() if word in gauge[1].split("_")), "none")
                assert panel["fieldConfig"]["defaults"]["unit"] == unit, gauge[1]


@pytest.mark.parametrize("name", GAUGES)
def test_help_says_the_unit_of_a_gauge(name):
    """Of a ratio too: kept tokens are another share than kept bytes."""
    if {"bytes", "ratio", "imbalance"} & set(name.split("_")):
        assert "bytes" in GAUGES[name].lower()


@pytest.mark.parametrize("name", COUNTERS)
def test_help_of_a_counter_begins_with_what_is_counted(name):
    unit = name.split("_")[-1]
    if unit in ("segments", "tokens", "seconds", "bytes", "requests"):
        assert unit in COUNTERS[name].lower()
