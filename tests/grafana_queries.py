"""What the queries of a dashboard read, and the queries as Grafana would send them."""

import re

from benchmarks import grafana

VALUES = {
    "__rate_interval": "5m", "__interval": "1m", "__range": "6h", "__range_s": "21600",
    "run": "(a|b)", "rank": "(0|1)", "worst": "(0|1)", "node": "n",
}  # fmt: skip
"""What Grafana would put in."""

RANGE_FUNCTION = re.compile(r"\b(\w+)\(\s*[\w:]+\s*(?:\{[^}]*\})?\s*\[([^\]:]+)\]")
"""A function of a range vector, and the range."""

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
    """With the variables filled in.

    Raises:
        KeyError: there is one that Grafana would not know.
    """
    return grafana.substituted(text, VALUES)


def graphs(dashboard):
    """Panels that draw something, those of collapsed rows included."""
    return (panel for panel in grafana.panels_of(dashboard) if panel["type"] != "row")


def queries(dashboard):
    """``(where, query)`` of panels, annotations and variables."""
    for query in grafana.queries_of("", dashboard):
        yield f"{query.panel} {query.ref}", query.expression
    for variable in grafana.variables_of(dashboard):
        yield f"variable {variable['name']}", re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])[1]


def names_read(expression):
    """Every metric that an expression reads: all names that are no function, keyword, label or text."""
    named = {name for names in re.findall(r'__name__=~"([^"]*)"', expression) for name in names.split("|")}
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _WORDS | named
