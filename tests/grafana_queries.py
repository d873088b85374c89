"""The queries of a dashboard, without Grafana."""

import re

VALUES = {
    "__rate_interval": "5m", "__interval": "1m", "__range": "6h", "__range_s": "21600",
    "run": "(a|b)", "rank": "(0|1)", "node": "n",
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
    """With the variables filled in; what is not known is left as it is."""
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda m: VALUES.get(m[1] or m[2], m[0]), text)


def graphs(dashboard):
    """Panels that draw something, those of collapsed rows included."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(dashboard):
    """``(where, query)`` of panels, annotations and variables."""
    for panel in graphs(dashboard):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])[1]


def names_read(expression):
    """Every metric that an expression reads: all names that are no function, keyword, label or text."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - _WORDS
