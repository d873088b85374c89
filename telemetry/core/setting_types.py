"""Types of settings: how a value is parsed, and how its type and range read in a message, in --help and in the docs."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

TRUE_WORDS: Final = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS: Final = frozenset({"0", "false", "no", "off", ""})

_DOTTED_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class SettingError(ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"setting {name} = {shown}: allowed is {allowed}")


@dataclass(frozen=True, slots=True)
class SettingType:
    """The values that a setting accepts."""

    name: str
    """For users: ``number``, ``path``, ..."""
    allowed: str
    """For users: what is allowed, such as ``from 0.1 to 3600``. Empty if the name says it all."""
    parse: Callable[[str, Any], Any]
    """``parse(name, value)`` returns the checked value. It raises `SettingError` with the name."""


def number(low: float, high: float) -> SettingType:
    """A finite number in a closed range."""
    allowed = f"from {low:g} to {high:g}"

    def parse(name: str, value: Any) -> float:
        if isinstance(value, bool):
            raise SettingError(name, value, f"a number {allowed}")
        try:
            parsed = float(value)
        except (TypeError, ValueError):
            raise SettingError(name, value, f"a number {allowed}") from None
        if not (math.isfinite(parsed) and low <= parsed <= high):
            raise SettingError(name, value, f"a number {allowed}")
        return parsed

    return SettingType("number", allowed, parse)


def whole_number(low: int, high: int) -> SettingType:
    """An integer in a closed range."""
    allowed = f"from {low} to {high}"

    def parse(name: str, value: Any) -> int:
        try:
            parsed = int(value) if isinstance(value, str) else value
        except ValueError:
            raise SettingError(name, value, f"a whole number {allowed}") from None
        if isinstance(parsed, bool) or not isinstance(parsed, int) or not low <= parsed <= high:
            raise SettingError(name, value, f"a whole number {allowed}")
        return parsed

    return SettingType("whole number", allowed, parse)


def port() -> SettingType:
    """A TCP port; 0 for any free one; ``off``, which is parsed to None."""
    allowed = "from 1 to 65535, 0 for any free port, or off"
    inner = whole_number(0, 65535)

    def parse(name: str, value: Any) -> int | None:
        if value is None or value is False or (isinstance(value, str) and value.strip().lower() in {"off", "none"}):
            return None
        try:
            parsed: int = inner.parse(name, value)
        except SettingError:
            raise SettingError(name, value, f"a port {allowed}") from None
        return parsed

    return SettingType("port", allowed, parse)


def auto_or(inner: SettingType) -> SettingType:
    """A value of another type, or ``auto``, which is parsed to None."""

    def parse(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
            return None
        try:
            return inner.parse(name, value)
        except SettingError:
            raise SettingError(name, value, f"auto, or a {inner.name} {inner.allowed}") from None

    return SettingType(inner.name, f"{inner.allowed}, or auto", parse)


def or_none(inner: SettingType) -> SettingType:
    """A value of another type, or ``none``, which is parsed to None."""

    def parse(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        try:
            return inner.parse(name, value)
        except SettingError:
            raise SettingError(name, value, f"none, or a {inner.name} {inner.allowed}") from None

    return SettingType(inner.name, f"{inner.allowed}, or none", parse)


def choice(*values: str) -> SettingType:
    """One of several words. True and False mean ``on`` and ``off``."""

    def parse(name: str, value: Any) -> str:
        text = "on" if value is True else "off" if value is False else str(value).strip().lower()
        if text not in values:
            raise SettingError(name, value, " | ".join(values))
        return text

    return SettingType(" | ".join(values), "", parse)


def several_of(*values: str) -> SettingType:
    """Some of these words, separated by commas; ``none`` is the empty list. Parsed to a tuple without repeats."""
    allowed = f"a list of {', '.join(values)}; or none"

    def parse(name: str, value: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else () if value is None else value
        try:
            words = dict.fromkeys(str(part).strip().lower() for part in parts)
        except TypeError:
            raise SettingError(name, value, allowed) from None
        named = [word for word in words if word not in {"", "none"}]
        if not set(named) <= set(values) or (named and "none" in words):
            raise SettingError(name, value, allowed)
        return tuple(named)

    return SettingType("list", allowed, parse)


def _parse_switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise SettingError(name, value, "true or false (also 1/0, yes/no, on/off)")


def _parse_path(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise SettingError(name, value, "the path of a folder")
    return Path(text).expanduser()


def _parse_text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise SettingError(name, value, "a text that is not empty")
    return value


def _parse_address(name: str, value: Any) -> str:
    allowed = "the address to listen on, such as 127.0.0.1 or 0.0.0.0"
    if not isinstance(value, str) or not value.strip() or any(c.isspace() or c in "/\0" for c in value.strip()):
        raise SettingError(name, value, allowed)
    return value.strip()


def _parse_bounds(name: str, value: Any) -> tuple[float, ...]:
    allowed = "increasing numbers of seconds, such as 0.01,0.1,1,10 (at most 64)"
    parts = value.split(",") if isinstance(value, str) else value
    try:
        numbers = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        raise SettingError(name, value, allowed) from None
    increasing = all(a < b for a, b in pairwise(numbers))
    if not numbers or len(numbers) > 64 or not increasing or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise SettingError(name, value, allowed)
    return numbers


def _parse_callback(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, str) and _DOTTED_NAME.fullmatch(value.strip()):
        return value.strip()
    raise SettingError(name, value, "a function, or its dotted name, such as mypackage.alerts.notify")


SWITCH: Final = SettingType("on | off", "", _parse_switch)
FOLDER: Final = SettingType("path", "", _parse_path)
TEXT: Final = SettingType("text", "", _parse_text)
ADDRESS: Final = SettingType("address", "", _parse_address)
BOUNDS: Final = SettingType("list of numbers", "increasing, at most 64", _parse_bounds)
CALLBACK: Final = SettingType("function", "a function, or its dotted name", _parse_callback)
