"""Grafana's own schema of dashboards, as its Foundation SDK has it: what a field is called, and of which type it is.

The SDK reads and writes, and checks nothing. Here what it has read is held against its own annotations, and what it writes
again against the file: a field that the schema does not know is lost on the way.
"""

import enum
import typing
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models import dashboard as models

OF_PROMETHEUS = {"titleFormat", "textFormat", "tagKeys", "step"}
"""What the Prometheus data source reads of an annotation: the schema leaves it to each data source."""


def problems(content):
    """What of a dashboard is not as the schema has it, each with where it is."""
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(content)
    for panel in read.panels:  # what the SDK leaves as it was
        if getattr(panel, "transformations", None):
            panel.transformations = [models.DataTransformerConfig.from_json(step) for step in panel.transformations]
    yield from _types(read, "dashboard")
    yield from _lost(content, _plain(read), "dashboard")


def _types(value, where):
    for name, expected in typing.get_type_hints(type(value)).items():
        found = getattr(value, name)
        if not _is(found, expected):
            yield f"{where}.{name}: {found!r} is no {expected}"
        for number, part in enumerate(found if isinstance(found, list) else [found]):
            if hasattr(part, "to_json"):
                yield from _types(part, f"{where}.{name}[{number}]")


def _is(value, expected):
    if expected in (Any, object) or expected is type(value):
        return True
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Union:
        return any(_is(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_is(part, arguments[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(part, arguments[1]) for part in value.values())
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return value in [member.value for member in expected]
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, expected) and not (expected is int and isinstance(value, bool))


def _plain(value):
    if hasattr(value, "to_json"):
        return _plain(value.to_json())
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def _lost(content, again, where):
    if isinstance(content, dict) and isinstance(again, dict):
        for key in content:
            if key in again:
                yield from _lost(content[key], again[key], f"{where}.{key}")
            elif not (where.startswith("dashboard.annotations.list[") and key in OF_PROMETHEUS):
                yield f"{where}.{key}: the schema has no such field"
    elif isinstance(content, list) and isinstance(again, list) and len(content) == len(again):
        for number, (one, other) in enumerate(zip(content, again)):
            yield from _lost(one, other, f"{where}[{number}]")
    elif content != again:
        yield f"{where}: {content!r} is read as {again!r}"
