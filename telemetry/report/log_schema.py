"""The fields of a log line that the report reads, and their types.

Only this file checks what was read. A field that is missing, null or of the wrong type is left out. So the rest of the
report can rely on the types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from telemetry.report.sample_names import GPU_NUMBERS, HOST_NUMBERS, WORKERS_NUMBERS
from telemetry.util.text import one_line

_LARGEST: Final = 1e15
"""No seconds, bytes or steps of a run are larger. A field with a larger number is damaged."""

_LATEST: Final = 2e11
"""Unix time of the year 8307."""

Check = Callable[[Any], Any]
"""Returns the value as the report can use it, or raises `_WrongTypeError`."""


class _WrongTypeError(Exception):
    """The value has not the type of this field."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongTypeError
    return value if value.isprintable() else one_line(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise _WrongTypeError  # NaN compares false
    return value


def _count(value: Any) -> int:
    number = _number(value)
    if number < 0 or number != int(number):
        raise _WrongTypeError
    return int(number)


def _unix_seconds(value: Any) -> float:
    """A time that a calendar has."""
    number = _number(value)
    if not 0 <= number <= _LATEST:
        raise _WrongTypeError
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongTypeError
    return value


def _scalar(value: Any) -> Any:
    """A value that a setting can have: text, a number or a truth value."""
    if isinstance(value, bool):
        return value
    return _text(value) if isinstance(value, str) else _number(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongTypeError
    return value


def _numbers(value: Any) -> dict[str, float]:
    """Numbers by name. If one is wrong, all are: a ledger without a category no longer sums to the wall clock."""
    return {_text(name): _number(number) for name, number in _mapping(value).items() if number is not None}


def _scalars(value: Any) -> dict[str, Any]:
    """Settings by name. One without a value is left out."""
    return {_text(name): _scalar(each) for name, each in _mapping(value).items() if each is not None}


def _stacks(value: Any) -> list[str]:
    """Stacks of a stuck run, which have line breaks; or names that nobody shows."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _WrongTypeError
    return value


def _spans(value: Any) -> list[tuple[int, int]]:
    """Ranges of ranks: the first and the last of each."""
    if not isinstance(value, list) or not all(isinstance(span, list) and len(span) == 2 for span in value):
        raise _WrongTypeError
    return [(_count(first), _count(last)) for first, last in value]


@dataclass(frozen=True, slots=True)
class _Object:
    """A field with an object, or a list of objects, whose own fields are checked one by one.

    Attributes:
        fields: the fields that are checked.
        keep_others: whether other fields are kept as they are.
        listed: whether the value is a list of such objects.
    """

    fields: Mapping[str, Kind]
    keep_others: bool = False
    listed: bool = False


Kind = Check | _Object

_ADVICE: Final = _Object(
    {
        "action": _text,
        "setting": _text,
        "value": _scalar,
        "predicted_speedup": _number,
        "predicted_low": _number,
        "because": _text,
    },
    listed=True,
)

_LINE: Final = _Object(
    {"file": _text, "line": _count, "function": _text, "calls": _text, "share_ratio": _number},
    listed=True,
)

_EVIDENCE: Final = _Object(
    {
        "lost_seconds": _numbers,
        "stuck_in": _text,
        "stuck_at": _text,
        "stuck_for_seconds": _number,
        "stacks": _stacks,
        "lines": _LINE,
        "lines_of": _text,
        "line_verdict": _text,
        "share_ratio": _number,
        "also": _Object({"cause": _text, "share_ratio": _number, "advice": _ADVICE}, listed=True),
    },
    keep_others=True,
)

_EVERY_LINE: Final[Mapping[str, Kind]] = {
    "event": _text,
    "time": _text,
    "run": _text,
    "rank": _count,
    "local_rank": _count,
    "node": _text,
    "pid": _count,
}

_TOTALS: Final[Mapping[str, Kind]] = {
    "steps_total": _count,
    "wall_seconds": _number,
    "ledger_total_seconds": _numbers,
    "exposed_wait_total_seconds": _number,
    "exposed_wait_absent": _text,
    "first_wait_seconds": _number,
    "unseen_steps_total": _count,
    "samples_total": _count,
    "tokens_total": _count,
    "gpu_energy_total_joules": _numbers,
    "gpu_uuid": _text,
    "overhead_seconds": _numbers,
    "stall_lost_total_seconds": _numbers,
    "child_processes": _count,
    "optimizer_steps_total": _count,
    "resumption": _mapping,
    "memory": _Object(
        {
            "growth_bytes_per_hour": _number,
            "where": _text,
            "exhausted_in_seconds": _number,
            "exhausted": _text,
            "copied_on_write": _flag,
            "advice": _text,
        }
    ),
    "oom_kills_total": _count,
}

RESUMPTION: Final[Mapping[str, Kind]] = {
    "optimizers": _count,
    "restore_seconds": _number,
    "resumed_step": _count,
    "resumed_from": _text,
    "resumed_at_optimizer_steps": _count,
    "replayed_batches": _count,
    "replay_seconds": _number,
    "replay_wait_seconds": _number,
}
"""The fields of ``resumption``. They are checked in the newest line alone."""

HEARTBEAT: Final[Mapping[str, Kind]] = {**_TOTALS, "life": _text, "unix_seconds": _unix_seconds}
"""The fields of a heartbeat."""

_STALL: Final[Mapping[str, Kind]] = {
    "cause": _text,
    "opened": _text,
    "closed": _text,
    "first_step": _count,
    "last_step": _count,
    "exposed_wait_ratio": _number,
    "evidence": _EVIDENCE,
    "advice": _ADVICE,
}

_SETTINGS: Final = _Object(
    dict.fromkeys(("interval_seconds", "log_interval_seconds", "stall_enter_ratio", "gpu_hour_price"), _number)
)

_END: Final = {
    "exception": _text,
    "exit_status": _number,
    "lost_peer": _flag,
    "replaced": _flag,
    "stuck_for_seconds": _number,
}

_SURROUNDINGS: Final[Mapping[str, Kind]] = {"environment": _scalars, "loader": _scalars}

FIELDS: Final[Mapping[str, Mapping[str, Kind]]] = MappingProxyType(
    {
        "run_start": {
            "started": _text,
            "continued": _flag,
            "life": _text,
            "world_size": _count,
            "claimed_rank": _count,
            "settings": _SETTINGS,
            "process_started": _text,
            "launcher": _text,
            "launch": _text,
            "restarts": _count,
            "memory_group": _text,
            "memory_events": _text,
            "oom_kills_total": _count,
            "telemetry_version": _text,
            "python_version": _text,
            "cpu_count": _count,
            **_SURROUNDINGS,
            "step_sketch": _mapping,  # `sketch.parse_counts` checks each count
            "step_max_seconds": _number,
            "data_wait_sketch": _mapping,
            "data_wait_max_seconds": _number,
        },
        "window": {
            **_TOTALS,
            **_SURROUNDINGS,
            "step_seconds": _numbers,
            "data_wait_seconds": _numbers,
            "step_sketch": _mapping,
            "data_wait_sketch": _mapping,
            "cpu_total_seconds": _numbers,
        },
        "phase": {
            **dict.fromkeys(("name", "category", "started"), _text),
            "seconds": _number,
            "complete": _flag,
            "holds_optimizer": _flag,
            "optimizer_steps_total": _count,
            "steps_total": _count,
            "loop_seconds": _numbers,
        },
        "run_end": {**_TOTALS, **_END},
        "gpu": {"name": _text, "throttled": _stacks, **dict.fromkeys(GPU_NUMBERS, _number)},
        "host": {"pressure_ratio": _numbers, **dict.fromkeys(HOST_NUMBERS, _number)},
        "workers": dict.fromkeys(WORKERS_NUMBERS, _number),
        "change": {
            "at": _text,
            "first_step": _count,
            "ratio": _number,
            "part": _text,
            "with": _Object({"what": _text, "before": _number, "after": _number}, listed=True),
        },
        "stall_open": _STALL,
        "stall_lines": _STALL,
        "stall_close": _STALL,
        "straggler_lines": {"evidence": _EVIDENCE},
        "hang": {
            "since": _text,
            "verdict": _text,
            "kind": _text,
            "over": _flag,
            "silent_ranks": _count,
            "suspects": _Object({"rank": _count, "node": _text, "where": _text, "doing": _text}, listed=True),
            "waiting": _Object({"ranks": _spans, "collective": _text, "sequence": _count}, listed=True),
        },
        "snapshot": {
            "path": _text,
            "first_step": _count,
            "last_step": _count,
            "reason": _text,
            "breakdown": _numbers,
        },
        "error": {"message": _text, "errors_total": _count},
    }
)
"""The fields that the report reads, by event, without those that every line has."""


def checked(line: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a log line that the report reads, if their types are right.

    Args:
        line: the parsed JSON object.

    Returns:
        The fields, and the names of those that were left out because of a wrong type.
    """
    wrong: list[str] = []
    event = line.get("event")
    own = FIELDS.get(event, {}) if isinstance(event, str) else {}
    return _sound(line, _EVERY_LINE, wrong) | _sound(line, own, wrong), wrong


def checked_fields(mapping: Mapping[str, Any], fields: Mapping[str, Kind]) -> tuple[dict[str, Any], list[str]]:
    """As `checked`, for an object that is no log line."""
    wrong: list[str] = []
    return _sound(mapping, fields, wrong), wrong


def _sound(mapping: Mapping[str, Any], fields: Mapping[str, Kind], wrong: list[str]) -> dict[str, Any]:
    sound: dict[str, Any] = {}
    for name, kind in fields.items():
        value = mapping.get(name)
        if value is None:
            continue
        try:
            sound[name] = _nested(value, kind, wrong) if isinstance(kind, _Object) else kind(value)
        except _WrongTypeError:
            wrong.append(name)
    return sound


def _nested(value: Any, kind: _Object, wrong: list[str]) -> Any:
    if kind.listed:
        if not isinstance(value, list):
            raise _WrongTypeError
        return [_nested(each, replace(kind, listed=False), wrong) for each in value]
    mapping = _mapping(value)
    others = {name: each for name, each in mapping.items() if name not in kind.fields} if kind.keep_others else {}
    return others | _sound(mapping, kind.fields, wrong)
