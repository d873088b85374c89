"""Checks dashboards against Grafana's own schema in its Foundation SDK: names and types of fields.

The SDK reads and writes, but checks nothing. So the values that it has read are compared with its type annotations, and
its output with the file: a field that the schema does not know is missing in the output.
"""

import enum
import typing
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models import dashboard as models

OF_PROMETHEUS = {"titleFormat", "textFormat", "tagKeys", "step"}
"""Fields of an annotation for the Prometheus data source. The schema leaves them to each data source."""


def problems(content):
    """The differences between a dashboard and the schema, each with its place."""
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(content)
    for panel in read.panels:  # the SDK leaves these unchanged
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
