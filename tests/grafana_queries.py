"""The metrics that the queries of a dashboard read, and the queries as Grafana would send them."""

import re

from benchmarks import grafana

VALUES = {
    "__rate_interval": "5m", "__interval": "1m", "__range": "6h", "__range_s": "21600",
    "run": "(a|b)", "rank": "(0|1)", "node": "n",
}  # fmt: skip
"""The values that Grafana would substitute."""

RANGE_FUNCTION = re.compile(r"\b(\w+)\(\s*[\w:]+\s*(?:\{[^}]*\})?\s*\[([^\]:]+)\]")
"""Matches a function of a range vector, and the range."""

_WORDS = {
    "and",
    "or",
    "unless",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "by",
    "without",
    "bool",
    "offset",
    "inf",
}


def expanded(text):
    """The query with its variables substituted.

    Raises:
        KeyError: it has a variable that Grafana does not know.
    """
    return grafana.substituted(text, VALUES)


def graphs(dashboard):
    """Panels with graphs, including those of collapsed rows."""
    return (panel for panel in grafana.panels_of(dashboard) if panel["type"] != "row")


def queries(dashboard):
    """``(where, query)`` of panels, annotations and variables."""
    for query in grafana.queries_of("", dashboard):
        yield f"{query.panel} {query.ref}", query.expression
    for variable in grafana.variables_of(dashboard):
        yield f"variable {variable['name']}", re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])[1]


def names_read(expression):
    """Every metric that an expression reads: all names except functions, keywords, labels and text."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _WORDS
