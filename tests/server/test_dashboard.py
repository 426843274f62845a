"""The dashboard and the page about metrics name what a server exports, and the page names all that we add."""

import functools
import json
import re
import urllib.request
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from tests.paths import ROOT

from .ask import CODE, completion
from .server import Server

pytestmark = pytest.mark.slow

REPOSITORY = ROOT
DASHBOARD = REPOSITORY / "examples/grafana/vllm-dllm.json"
PAGE = REPOSITORY / "docs/metrics.md"
NAME = re.compile(r"\bvllm(?:_dllm)?:\w+")
SELECTOR = 'model_name="$model_name", engine=~"$engine"'


@pytest.fixture(scope="module")
def families(server: Server, client: openai.OpenAI) -> list[Metric]:
    """What a server exports that has answered a request."""
    client.completions.create(**completion(CODE))
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=10) as response:
        return list(text_string_to_metric_families(response.read().decode()))


def our_metrics(families: list[Metric]) -> dict[str, str]:
    """Type of each metric of ours. The client library adds when it was created, which is none."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in families
        if family.name.startswith("vllm_dllm:") and not family.name.endswith("_created")
    }


def sample_names(families: list[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def deer_names() -> set[str]:
    """Names of vLLM's metrics of speculative decoding, which a server has that drafts with DEER."""
    registry = CollectorRegistry()

    class Metrics(SpecDecodingProm):
        _counter_cls = functools.partial(Counter, registry=registry)

    Metrics(SimpleNamespace(num_speculative_tokens=2), ["model_name", "engine"], {0: ["m", "0"]})
    return sample_names(list(registry.collect()))


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def expressions(dashboard: dict[str, Any]) -> dict[str, list[str]]:
    """PromQL of every panel, by the panel's title."""
    panels = {panel["title"]: panel for panel in dashboard["panels"] if panel["type"] != "row"}
    return {title: [target["expr"] for target in panel["targets"]] for title, panel in panels.items()}


def test_every_metric_of_the_dashboard_is_one_that_servers_export(
    expressions: dict[str, list[str]], families: list[Metric]
) -> None:
    exported = sample_names(families) | deer_names()
    unknown = {
        title: names
        for title, panel in expressions.items()
        if (names := {name for expr in panel for name in NAME.findall(expr)} - exported)
    }
    assert not unknown


def test_the_dashboard_shows_every_metric_of_ours(expressions: dict[str, list[str]], families: list[Metric]) -> None:
    shown = {name for panel in expressions.values() for expr in panel for name in NAME.findall(expr)}
    ours = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown if name.startswith("vllm_dllm:")}
    assert ours == set(our_metrics(families))


def test_every_expression_is_about_the_chosen_model_and_engines(expressions: dict[str, list[str]]) -> None:
    for panel in expressions.values():
        for expr in panel:
            selectors = re.findall(r"(\S+?)\{(.*?)\}", expr)
            assert len(selectors) == len(NAME.findall(expr)) > 0
            assert all(labels.startswith(SELECTOR) for _, labels in selectors)
            assert all(expr.count(left) == expr.count(right) for left, right in ("()", "{}", "[]"))


def test_the_dashboard_can_be_imported_beside_others(dashboard: dict[str, Any]) -> None:
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model_name", "engine"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    sources = [panel["datasource"] for panel in panels if panel["type"] != "row"]
    sources += [target["datasource"] for panel in panels for target in panel.get("targets", ())]
    sources += [variable["datasource"] for variable in dashboard["templating"]["list"][1:]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = [one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at] for at, size in ("xw", "yh")]
        assert any(apart), (one, other)


def test_the_page_describes_every_metric_of_ours_and_no_other(families: list[Metric]) -> None:
    described = re.findall(
        r"^\| `(vllm_dllm:\w+)` \| (\w+) \| [^|]*\w[^|]* \| [^|]*\w[^|]* \|$", PAGE.read_text(), re.M
    )
    assert sorted(described) == sorted(our_metrics(families).items())


def test_every_metric_that_the_page_mentions_is_exported(families: list[Metric]) -> None:
    exported = sample_names(families) | deer_names() | {family.name for family in families}
    mentioned = {name for name in NAME.findall(PAGE.read_text()) if not name.endswith("_")}
    assert not mentioned - exported
