"""Every query of the dashboards as Grafana would send it: with its variables resolved, for each run to choose."""

import itertools
import json
import re
import time
import urllib.error
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import yaml

from benchmarks import grafana
from stack.cluster import shipped
from stack.jobs import get

RANGE_SECONDS = 300
ASKED_AT_A_TIME = 4


@dataclass
class Answer:
    """The result of a query: errors, and the number of series with a value for each choice of the variables."""

    errors: list = field(default_factory=list)
    series: dict = field(default_factory=dict)


def hastened(expression):
    """An expression of a dashboard with its own durations on the faster clock."""
    return re.sub(r"(?<=[\[:])(\d+[smhd])(?=[]:])", lambda match: shipped.faster(match[1]), expression)


def scrape_seconds():
    """The scrape interval that Grafana assumes, on the faster clock."""
    provisioned = yaml.safe_load((shipped.DEPLOY / "compose" / "grafana" / "datasources.yml").read_text())
    (source,) = [source for source in provisioned["datasources"] if source["type"] == "prometheus"]
    return int(shipped.faster(source["jsonData"]["timeInterval"]).removesuffix("s"))


class Store:
    """A server with Prometheus's query interface."""

    def __init__(self, port):
        self._api = f"http://127.0.0.1:{port}/api/v1/"
        self.now = time.time()

    def _get(self, path, **parameters):
        try:
            return json.loads(get(self._api + path + "?" + urllib.parse.urlencode(parameters), seconds=20))["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def options(self, query):
        """The values of a variable.

        Raises:
            ValueError: an error, or an unknown form of query.
        """
        match = re.fullmatch(r"label_values\((?:(.*), *)?(\w+)\)", query)
        if match is None:
            raise ValueError(f"neither label_values(metric, label) nor label_values(label): {query}")
        selector = {"match[]": match[1]} if match[1] else {}
        return self._get(f"label/{match[2]}/values", start=self.now - RANGE_SECONDS, end=self.now, **selector)

    def count(self, query, expression, step):
        """The number of series with a value that a query returns.

        Raises:
            ValueError: the query failed.
        """
        if query.instant:
            result = self._get("query", query=expression, time=self.now)["result"]
            return sum(series["value"][1] != "NaN" for series in result)
        data = self._get("query_range", query=expression, start=self.now - RANGE_SECONDS, end=self.now, step=step)
        return sum(any(value != "NaN" for _, value in series["values"]) for series in data["result"])


def scenes_of(store, dashboard, answers, name):
    """Every choice of the variables that take one value. All values are chosen for the others.

    Returns:
        Pairs of the name of a choice and the values to substitute.
    """
    scenes = [((), {})]
    for variable in grafana.variables_of(dashboard):
        following = []
        for labels, values in scenes:
            text = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
            query = grafana.Query(name, "variable", variable["name"], text)
            answer = answers.setdefault(query.key, Answer())
            try:
                options = store.options(grafana.substituted(text, values))
            except (ValueError, KeyError) as error:
                answer.errors.append(f"{text}: {error!r}")
                continue
            answer.series[labels] = len(options)
            if not options:
                continue
            single = not variable.get("multi")
            for choice in [[option] for option in options] if single else [options]:
                label = (*labels, choice[0]) if single else labels
                following.append((label, values | {variable["name"]: grafana.chosen(variable, choice)}))
        scenes = following
    return scenes


def ask_all(port):
    """Run all queries. Returns the answers by query."""
    store, answers, step = Store(port), {}, scrape_seconds()
    times, asked = grafana.times(RANGE_SECONDS, step, step), []
    for name, dashboard in grafana.load().items():
        scenes = scenes_of(store, dashboard, answers, name)
        asked += itertools.product(grafana.queries_of(name, dashboard), scenes)

    def ask(pair):
        query, (label, values) = pair
        try:
            expression = grafana.substituted(hastened(query.expression), values | times)
            return query, label, store.count(query, expression, step), None
        except (ValueError, KeyError, OSError) as error:
            return query, label, 0, f"{label}: {query.expression}: {error!r}"

    with ThreadPoolExecutor(ASKED_AT_A_TIME) as pool:
        for query, label, count, error in pool.map(ask, asked):
            answer = answers.setdefault(query.key, Answer())
            answer.series[label] = answer.series.get(label, 0) + count
            if error is not None:
                answer.errors.append(error)
    return answers
