"""The web page, ``radixrt top`` and Grafana show the same graphs under the same names."""

import re
from pathlib import Path

from deploy.monitoring.dashboard import PANELS
from radixrt.kv.reading import PoolParts

STATIC = Path(__file__).parents[2] / "radixrt" / "api" / "page" / "static"


def charts_of_the_page() -> dict[str, list[str]]:
    """Names of the series of each chart, by its title."""
    source = (STATIC / "dashboard.js").read_text()
    names = lambda text: re.findall(r'name: "([^"]+)"', text)  # noqa: E731
    shared = {name: names(text) for name, text in re.findall(r"^const (\w+) = \[(.*)\];", source, re.M)}  # fmt: skip
    charts = re.findall(r'new Chart\("([^"]+)", (?:\[(.*?)\]|(\w+)),', source, re.S)
    return {
        title: shared[variable] if variable else names(text) for title, text, variable in charts
    }


def test_the_charts_of_the_page_are_panels_of_grafana() -> None:
    panels = {panel.title: list(panel.queries) for panel in PANELS}
    charts = charts_of_the_page()
    assert len(charts) == 6
    for title, names in charts.items():
        # The free part of the pool is what the areas of the page leave of its scale.
        assert names == [name for name in panels[title] if name != "free"], title


def test_the_pool_has_the_same_parts_everywhere() -> None:
    parts = list(PoolParts.__struct_fields__)
    assert next(list(panel.queries) for panel in PANELS if panel.title == "KV pool") == parts
    assert charts_of_the_page()["KV pool"] == parts[:-1]
