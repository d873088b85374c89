"""Settings: one frozen dataclass, from keywords and TELEMETRY_* variables, validated once.

A bad value raises `SettingError`, which names the setting, the value and what is allowed, before anything of the
agent has started.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ENV_PREFIX: Final = "TELEMETRY_"
DISABLED_VARIABLE: Final = "TELEMETRY_DISABLED"

MIB: Final = 1 << 20


class SettingError(ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"setting {name} = {shown}: allowed is {allowed}")


def _number(low: float, high: float, what: str) -> Callable[[str, Any], float]:
    def parse(name: str, value: Any) -> float:
        allowed = f"{what}, from {low:g} to {high:g}"
        if isinstance(value, bool):
            raise SettingError(name, value, allowed)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise SettingError(name, value, allowed) from None
        if not (math.isfinite(number) and low <= number <= high):
            raise SettingError(name, value, allowed)
        return number

    return parse


def _whole(low: int, high: int, what: str) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        allowed = f"{what}, from {low} to {high}"
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            raise SettingError(name, value, allowed) from None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise SettingError(name, value, allowed)
        return number

    return parse


_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SettingError(name, value, "true or false (also 1/0, yes/no, on/off)")


def _port(name: str, value: Any) -> int | None:
    """A port number, 0 for any free one, None for off."""
    allowed = "a port from 1 to 65535, 0 for any free port, or off"
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in {"off", "none"}):
        return None
    try:
        return _whole(0, 65535, "a port")(name, value)
    except SettingError:
        raise SettingError(name, value, allowed) from None


def _auto_or(parse: Callable[[str, Any], float]) -> Callable[[str, Any], float | None]:
    def parse_auto(name: str, value: Any) -> float | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
            return None
        try:
            return parse(name, value)
        except SettingError as error:
            raise SettingError(name, value, f"auto, or {str(error).split('allowed is ')[-1]}") from None

    return parse_auto


def _choice(*allowed: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        text = "on" if value is True else "off" if value is False else str(value).strip().lower()
        if text not in allowed:
            raise SettingError(name, value, " | ".join(allowed))
        return text

    return parse


def _path(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise SettingError(name, value, "the path of a folder")
    return Path(text).expanduser()


def _text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise SettingError(name, value, "a text that is not empty")
    return value


def _address(name: str, value: Any) -> str:
    allowed = "the address to listen on, such as 127.0.0.1 or 0.0.0.0"
    if not isinstance(value, str) or not value.strip() or any(c.isspace() or c in "/\0" for c in value.strip()):
        raise SettingError(name, value, allowed)
    return value.strip()


def _buckets(name: str, value: Any) -> tuple[float, ...]:
    allowed = "rising numbers of seconds, such as 0.01,0.1,1,10 (at most 64)"
    parts = value.split(",") if isinstance(value, str) else value
    try:
        numbers = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        raise SettingError(name, value, allowed) from None
    rising = all(a < b for a, b in pairwise(numbers))
    if not numbers or len(numbers) > 64 or not rising or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise SettingError(name, value, allowed)
    return numbers


_DOTTED: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _callback(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, str) and _DOTTED.fullmatch(value.strip()):
        return value.strip()
    raise SettingError(name, value, "a function, or the dotted name of one, such as mypackage.alerts.tell")


# 10 ms to 60 s; each bound about 1.55 times the one before, rounded to what a person would type.
STEP_BUCKETS: Final = (
    0.01, 0.016, 0.025, 0.04, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 1.0, 1.6, 2.5, 4.0, 6.0, 10.0, 16.0, 25.0, 40.0, 60.0,
)  # fmt: skip


def _setting(default: Any, parse: Callable[[str, Any], Any], help_text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help_text})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. `Config.load` is the way to make one; a default is what a long run should have."""

    run_dir: Path | None = _setting(None, _path, "folder of this run's logs (default: telemetry-runs/RUN)")
    run: str | None = _setting(None, _text, "name of the run (default: the job's id, or the run folder's name)")
    interval_seconds: float = _setting(1.0, _number(0.1, 3600, "seconds between two samples"), "between two samples")
    log_interval_seconds: float = _setting(
        10.0,
        _number(0.1, 86400, "seconds between two log lines of a kind"),
        "between two log lines of a kind",
    )
    port: int | None = _setting(9464, _port, "port of the node's metrics endpoint; 0 = any; off")
    host: str = _setting("127.0.0.1", _address, "address the endpoint listens on")
    stall_enter_ratio: float = _setting(0.20, _number(0.01, 1, "a ratio"), "share of a window lost that opens a stall")
    stall_exit_ratio: float = _setting(0.10, _number(0, 1, "a ratio"), "share of a window lost that closes a stall")
    stall_window_seconds: float = _setting(
        30.0, _number(1, 86400, "seconds"), "length of the window a stall is judged over"
    )
    on_stall: Any = _setting(
        None,
        _callback,
        "function (or its dotted name) called with the fields of every stall that opens, on a thread of its own; "
        "stalls that open while it runs are counted and not told",
    )
    stuck_seconds: float | None = _setting(
        None,
        _auto_or(_number(1, 604800, "seconds")),
        "no step for so long is a stuck run; auto: from the steps seen",
    )
    snapshot_steps: int = _setting(5, _whole(1, 50, "a number of steps"), "steps in one trace")
    snapshot_settle_seconds: float = _setting(
        15.0, _number(0, 86400, "seconds"), "how long a stall must hold before it is traced"
    )
    snapshot_cooldown_seconds: float = _setting(
        600.0, _number(0, 604800, "seconds"), "least time between a trace and the next one that a stall asks for"
    )
    max_snapshots: int = _setting(10, _whole(0, 10000, "a number of traces"), "most traces in one run; 0 for none")
    snapshot_disk_bytes: int = _setting(1024 * MIB, _whole(0, 1 << 50, "bytes"), "disk the traces of one run may take")
    snapshot_max_seconds: float = _setting(
        10.0, _number(0.1, 600, "seconds"), "a trace is cut short at the first step that ends after so long"
    )
    snapshot_max_bytes: int = _setting(
        512 * MIB, _whole(MIB, 1 << 40, "bytes"), "most bytes of one trace, uncompressed"
    )
    gpu_events: str = _setting("auto", _choice("auto", "on", "off"), "time the exposed wait with CUDA events")
    nvtx: bool = _setting(
        False, _switch, "mark steps, waits, phases and the workers' fetches as NVTX ranges, for Nsight Systems"
    )
    patch: bool = _setting(True, _switch, "recognise DataLoaders, optimizers and checkpoints without being told")
    start_line: bool = _setting(True, _switch, "print one line on stderr at the start")
    log_max_bytes: int = _setting(16 * MIB, _whole(65536, 1 << 40, "bytes"), "size at which a log file is rotated")
    log_max_files: int = _setting(8, _whole(1, 1000, "a number of files"), "log files kept of one process")
    targets_dir: Path | None = _setting(None, _path, "folder for the file_sd target file (default: RUN_DIR/targets)")
    step_buckets: tuple[float, ...] = _setting(
        STEP_BUCKETS, _buckets, "upper bounds, in seconds, of the step duration histogram"
    )

    @classmethod
    def load(cls, settings: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
        """Settings from keywords, then TELEMETRY_* variables, then defaults.

        Raises:
            SettingError: a name is unknown, a value is not allowed, or two values contradict each other.
        """
        environ = os.environ if environ is None else environ
        known = {f.name: f for f in fields(cls)}
        for name in settings:
            if name not in known:
                close = _closest(name, known)
                hint = f"; did you mean {close}?" if close else ""
                raise SettingError(name, settings[name], f"no setting of that name{hint}")
        values: dict[str, Any] = {}
        for name, spec in known.items():
            variable = ENV_PREFIX + name.upper()
            if name in settings:
                values[name] = spec.metadata["parse"](name, settings[name])
            elif variable in environ:
                values[name] = spec.metadata["parse"](f"{name} (from {variable})", environ[variable])
        config = cls(**values)
        if config.stall_exit_ratio >= config.stall_enter_ratio:
            raise SettingError(
                "stall_exit_ratio",
                config.stall_exit_ratio,
                f"less than stall_enter_ratio ({config.stall_enter_ratio:g})",
            )
        if config.interval_seconds > config.stall_window_seconds:
            raise SettingError(
                "interval_seconds",
                config.interval_seconds,
                f"at most stall_window_seconds ({config.stall_window_seconds:g})",
            )
        return config

    def as_log_fields(self) -> dict[str, Any]:
        """The settings as JSON values, for the log."""
        shown: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            shown[spec.name] = _shown(value)
        return shown


def _shown(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value


def disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether TELEMETRY_DISABLED turns everything off. Anything but an explicit "no" counts as yes."""
    value = (os.environ if environ is None else environ).get(DISABLED_VARIABLE, "")
    return value.strip().lower() not in _FALSE


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """TELEMETRY_* variables that are no setting: a typo, or another program's. Each with the closest one, if any is."""
    environ = os.environ if environ is None else environ
    known = [f.name.upper() for f in fields(Config)] + [DISABLED_VARIABLE.removeprefix(ENV_PREFIX)]
    found: dict[str, str | None] = {}
    for variable in sorted(environ):
        name = variable[len(ENV_PREFIX) :]
        if variable.upper().startswith(ENV_PREFIX) and not (variable.startswith(ENV_PREFIX) and name in known):
            close = _closest(name.upper(), known)
            found[variable] = ENV_PREFIX + close if close else None
    return found


def _closest(name: str, known: Iterable[str]) -> str | None:
    import difflib  # 1 ms, which a process whose settings are right is spared

    beginning = [other for other in known if name and other.startswith(f"{name}_")]  # INTERVAL for INTERVAL_SECONDS
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or beginning
    return close[0] if close else None
