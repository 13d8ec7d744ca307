"""Dashboard, alerts and the list of metrics name what a server exposes, and leave nothing of it out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pagetier.engine.metrics import ServerMetrics
from tests.engine.server.double import DoubleCore

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
NAME = re.compile(r"\b(?:vllm:|pagetier_)[a-z0-9_]+")
SUFFIXES = ("_bucket", "_count", "_sum")


def exposed() -> tuple[set[str], set[str]]:
    """Names of samples, and of whole metrics, of a server that has served a request."""
    metrics = ServerMetrics("double")
    metrics.answered("/v1/completions", 200)
    metrics.request_ended(
        arrival_s=0.0,
        first_token_s=1.0,
        end_s=2.0,
        gaps_s=[0.1],
        prompt_tokens=3,
        completion_tokens=2,
        finish_reasons=["stop"],
    )
    samples = set(re.findall(r"^([a-z][a-z0-9_:]+)[{ ]", metrics.scrape(DoubleCore().stats()).decode(), re.MULTILINE))
    samples = {name for name in samples if not name.endswith("_created")}
    return samples, {re.sub(rf"({'|'.join(SUFFIXES)})$", "", name) for name in samples}


def dashboard() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return fields


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    listed: list[dict[str, Any]] = group["rules"]
    return listed


def test_every_expression_names_what_is_exposed() -> None:
    samples, _ = exposed()
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += [rule["expr"] for rule in rules()]
    expressions += [variable["query"] for variable in dashboard()["templating"]["list"]]
    assert len(expressions) > 40
    unknown = {name for expression in expressions for name in NAME.findall(expression) if name not in samples}
    assert not unknown


def test_every_metric_is_explained_and_those_of_tiers_are_shown() -> None:
    _, metrics = exposed()
    told = set(NAME.findall((FOLDER / "README.md").read_text()))
    assert metrics == {name for name in told if name != "pagetier_"}
    shown = set(NAME.findall(json.dumps(dashboard())))
    unseen = {name for name in metrics if name not in {re.sub(rf"({'|'.join(SUFFIXES)})$", "", one) for one in shown}}
    assert unseen <= {"pagetier_tier_hit_blocks_total", "pagetier_tier_hit_rate", "vllm:cache_config_info"}


def test_panels_say_what_they_show_and_do_not_lie_on_each_other() -> None:
    places: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places and place["x"] + place["w"] <= 24, panel["title"]
        places |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["action"], rule["alert"]
    assert len({rule["alert"] for rule in rules()}) == len(rules())
