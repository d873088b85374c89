"""Rewrites a query without recording rules: each recorded name is replaced by its expression."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<name>[a-zA-Z_:][\w:]*)(?P<matchers>\s*\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?(?P<range>\s*\[\w+\])?"""
)


def inlined(expression: str, rules: Mapping[str, str], metrics: Collection[str], interval: str) -> str:
    """An expression that only reads raw metrics.

    Matchers of a recorded name are added to every metric in its expression. A rule that reads its own earlier values
    has no such expression, and stays.

    Args:
        expression: PromQL, with Grafana's variables replaced.
        rules: the recording rules, expression by name.
        metrics: names of the raw metrics.
        interval: how often the rules are evaluated. A range over a recorded name becomes a subquery with this step.
    """

    def replace(name: str, matchers: str, window: str) -> str | None:
        rule = rules.get(name)
        if rule is None or name in rule:
            return None
        narrowed = _replaced(rule, lambda n, m, w: _narrowed(n, m, w, matchers) if n in rules or n in metrics else None)
        return f"({inlined(narrowed, rules, metrics, interval)})" + window.replace("]", f":{interval}]")

    return _replaced(expression, replace)


def _narrowed(name: str, matchers: str, window: str, more: str) -> str:
    both = ", ".join(filter(None, (matchers.strip(" {}\n"), more.strip(" {}\n"))))
    return f"{name}{{{both}}}{window}" if both else name + window


def _replaced(expression: str, replace: Callable[[str, str, str], str | None]) -> str:
    """Replace every name outside of text, with its matchers and its range. If ``replace`` returns None, it stays."""

    def one(match: re.Match[str]) -> str:
        if match["text"] is not None:
            return match[0]
        new = replace(match["name"], match["matchers"] or "", match["range"] or "")
        return match[0] if new is None else new

    return _TOKEN.sub(one, expression)
