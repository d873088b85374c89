"""Settings: one frozen dataclass, from keywords and TELEMETRY_* variables, validated once."""

from __future__ import annotations

import math
import os
import re
from dataclasses import Field, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# -- setting types -----------------------------------------------------------------------------------------------------
# Types of settings: how a value is parsed, and how its type and range read in a message, in --help and in the docs.

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


# -- settings: one frozen dataclass, from keywords and TELEMETRY_* variables, validated once ---------------------------
# A value that is not allowed raises `SettingError` before the agent starts. The error names the setting, the value and
# what is allowed. The fields of `Config` are the only table of settings: ``telemetry run --help`` and the documentation
# are made from it, by `setting_docs`.

__all__ = [
    "DISABLED_VARIABLE",
    "ENV_PREFIX",
    "GROUPS",
    "STEP_BUCKETS",
    "TRIAL_VARIABLE",
    "Config",
    "SettingDoc",
    "SettingError",
    "disabled",
    "setting_docs",
    "unknown_variables",
]

ENV_PREFIX: Final = "TELEMETRY_"
DISABLED_VARIABLE: Final = "TELEMETRY_DISABLED"
TRIAL_VARIABLE: Final = "TELEMETRY_TUNE_TRIAL"
"""Set in every process of a trial of ``telemetry tune``, to the path of its plan. Scripts may look at it."""

SINKS: Final = ("tensorboard", "wandb", "mlflow")
"""Names of the sinks, in the order in which they are written: local files first."""

MIB: Final = 1 << 20

# 10 ms to 60 s; each bound is about 1.55 times the previous one, rounded to what a person would type.
STEP_BUCKETS: Final = (
    0.01, 0.016, 0.025, 0.04, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 1.0, 1.6, 2.5, 4.0, 6.0, 10.0, 16.0, 25.0, 40.0, 60.0,
)  # fmt: skip

GROUPS: Final = {
    "output": "where the run's logs go, and what they contain",
    "endpoint": "the Prometheus endpoint of the node",
    "stalls": "when a stall opens and closes, and when a run is stuck",
    "snapshots": "torch.profiler traces of a few steps, taken during a stall",
    "measuring": "what the agent measures, and how often",
}
"""The groups of settings, in the order in which --help and the documentation show them, with a description."""


def _setting(  # noqa: PLR0917 - a row of the table below: group, default, type, unit, help
    group: str, default: Any, kind: SettingType, unit: str | None, help_text: str, default_text: str | None = None
) -> Any:
    """One setting.

    Args:
        group: a key of `GROUPS`.
        default: the value if it is not set.
        kind: what is allowed.
        unit: unit of the value: ``seconds``, ``bytes``, ``ratio``, ``steps``, ...; None without a unit.
        help_text: one or two sentences for the user, without the default.
        default_text: the default in words, if the value alone does not explain it.
    """
    row = {"group": group, "kind": kind, "unit": unit, "help": help_text, "default_text": default_text}
    return field(default=default, metadata=row)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Make one with `Config.load`. The defaults suit a long run."""

    run_dir: Path | None = _setting("output", None, FOLDER, None, "Folder of this run's logs and snapshots.",
                                    "telemetry-runs/RUN")
    run: str | None = _setting("output", None, TEXT, None, "Name of the run.",
                               "the job's id, else the name of the run folder")
    node: str | None = _setting("output", None, TEXT, None, "Name of this node.",
                                "from Slurm or Kubernetes, else the name of the machine")
    log_interval_seconds: float = _setting("output", 10.0, number(0.1, 86400), "seconds",
                                           "Time between two log lines of the same event.")
    log_max_bytes: int = _setting("output", 16 * MIB, whole_number(65536, 1 << 40), "bytes",
                                  "Size at which a log file is rotated.")
    log_max_files: int = _setting("output", 8, whole_number(1, 1000), "files", "Log files kept for each process.")
    start_line: bool = _setting("output", True, SWITCH, None, "Print one line to stderr at the start.")
    sinks: tuple[str, ...] = _setting("output", (), several_of(*SINKS), None,
                                      "Loggers into which the agent writes the figures of each window.", "none")
    sink_ranks: str = _setting("output", "0", choice("0", "all"), None, "Ranks that write into them.")
    end_line: bool = _setting("output", True, SWITCH, None,
                              "Print one line to stderr at the end: what the run lost most to, or where its time "
                              "went. Rank 0 prints it.")
    gpu_hour_price: float | None = _setting("output", None, or_none(number(0, 1e6)), None,
                                            "Price of an hour of one GPU, in any currency: report and dashboard tell "
                                            "what stalls and restarts cost.", "none")

    port: int | None = _setting("endpoint", 9464, port(), None,
                                "Port of the metrics endpoint. A node has one endpoint.")
    host: str = _setting("endpoint", "127.0.0.1", ADDRESS, None, "Address the endpoint listens on.")
    targets_dir: Path | None = _setting("endpoint", None, FOLDER, None,
                                        "Folder for the target file of Prometheus' file_sd.", "RUN_DIR/targets")
    step_buckets: tuple[float, ...] = _setting("endpoint", STEP_BUCKETS, BOUNDS, "seconds",
                                               "Upper bounds of the buckets of the step duration histogram.")

    stall_enter_ratio: float = _setting("stalls", 0.20, number(0.01, 1), "ratio",
                                        "A stall opens when waits for data, or one other cause, take this share of a "
                                        "window.")
    stall_exit_ratio: float = _setting("stalls", 0.10, number(0, 1), "ratio",
                                       "A stall closes when they take less than this share of a window.")
    stall_window_seconds: float = _setting("stalls", 30.0, number(1, 86400), "seconds",
                                           "Length of the window that decides about stalls.")
    stuck_seconds: float | None = _setting("stalls", None, auto_or(number(1, 604800)), "seconds",
                                           "A run without a step for this long is stuck. auto: follows the length of "
                                           "the run's own steps.", "auto")
    on_stall: Any = _setting("stalls", None, CALLBACK, None,
                             "Called with the fields of each stall that opens. It runs on its own thread. Stalls that "
                             "open during a call are counted but not passed on.", "none")

    snapshot_on_stall: str = _setting("snapshots", "auto", choice("auto", "on", "off"), None,
                                      "Take a trace during a stall. auto: not on a GPU.")
    snapshot_steps: int = _setting("snapshots", 5, whole_number(1, 50), "steps", "Steps in one trace.")
    snapshot_settle_seconds: float = _setting("snapshots", 15.0, number(0, 86400), "seconds",
                                              "How long a stall must last before a trace is taken.")
    snapshot_cooldown_seconds: float = _setting("snapshots", 600.0, number(0, 604800), "seconds",
                                                "Minimum time between two traces that stalls ask for.")
    max_snapshots: int = _setting("snapshots", 10, whole_number(0, 10000), "traces",
                                  "Maximum number of traces in one run. 0: no traces.")
    snapshot_disk_bytes: int = _setting("snapshots", 1024 * MIB, whole_number(0, 1 << 50), "bytes",
                                        "Maximum disk space of all traces of one run.")
    snapshot_max_seconds: float = _setting("snapshots", 10.0, number(0.1, 600), "seconds",
                                           "A trace ends early at the first step boundary after this time.")
    snapshot_max_bytes: int = _setting("snapshots", 512 * MIB, whole_number(MIB, 1 << 40), "bytes",
                                       "Maximum size of one trace, uncompressed.")
    snapshot_memory_bytes: int = _setting("snapshots", 256 * MIB, whole_number(MIB, 1 << 40), "bytes",
                                          "Maximum memory that taking a trace needs.")
    snapshot_pause_seconds: float = _setting("snapshots", 1.0, number(0.01, 600), "seconds",
                                             "Maximum time that a trace takes from the training.")
    snapshot_shapes: bool = _setting("snapshots", False, SWITCH, None,
                                     "Record the operators' input shapes, which FLOPs and MFU are counted from.")

    interval_seconds: float = _setting("measuring", 1.0, number(0.1, 3600), "seconds",
                                       "Time between samples; up to 4 times that if nothing changes.")
    gpu_events: str = _setting("measuring", "auto", choice("auto", "on", "off"), None,
                               "Measure the exposed wait with CUDA events.")
    nvtx: bool = _setting("measuring", False, SWITCH, None,
                          "Mark steps, waits, phases and fetches as NVTX ranges for Nsight Systems.")
    patch: bool = _setting("measuring", True, SWITCH, None,
                           "Patch torch to detect DataLoaders, optimizer steps and checkpoints.")

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
                close = closest(name, known)
                hint = f"; did you mean {close}?" if close else ""
                raise SettingError(name, settings[name], f"no setting of that name{hint}")
        values: dict[str, Any] = {}
        for name, spec in known.items():
            variable = ENV_PREFIX + name.upper()
            kind: SettingType = spec.metadata["kind"]
            if name in settings:
                values[name] = kind.parse(name, settings[name])
            elif variable in environ:
                values[name] = kind.parse(f"{name} (from {variable})", environ[variable])
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
        return {spec.name: _shown(getattr(self, spec.name)) for spec in fields(self)}


def _shown(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return _name_of(value) if callable(value) else value


def _name_of(function: Any) -> str:
    """Where a function is defined; of an object that can be called, where its class is.

    Never its ``repr``: that of a `functools.partial` shows the arguments, which may hold a token.
    """
    while isinstance(function, partial):
        function = function.func
    named = isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, type))
    defined = function if named else type(function)
    return ".".join(filter(None, (defined.__module__, defined.__qualname__)))  # list.append is in no module


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """What a user has to know about one setting."""

    name: str
    """As a keyword. The option is ``--my-name``, the variable ``TELEMETRY_MY_NAME``."""
    group: str
    """A key of `GROUPS`."""
    type: str
    """``number``, ``whole number``, ``on | off``, ``path``, ``text``, ..."""
    allowed: str
    """What is allowed, such as ``from 0.1 to 3600``; empty if the type says it all."""
    default: str
    unit: str | None
    """``seconds``, ``bytes``, ``ratio``, ``steps``, ...; None without a unit."""
    help: str

    @property
    def option(self) -> str:
        """The option of ``telemetry run``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()


def setting_docs() -> list[SettingDoc]:
    """Every setting, sorted by the order of `GROUPS`."""
    docs = [_doc_of(spec) for spec in fields(Config)]
    return sorted(docs, key=lambda doc: list(GROUPS).index(doc.group))


def _doc_of(spec: Field[Any]) -> SettingDoc:
    row, kind = spec.metadata, spec.metadata["kind"]
    default = row["default_text"] or _default_text(spec.default, row["unit"])
    return SettingDoc(spec.name, row["group"], kind.name, kind.allowed, default, row["unit"], row["help"])


def _default_text(value: Any, unit: str | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    if unit == "bytes":
        return f"{value} ({value // MIB} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether TELEMETRY_DISABLED turns everything off. Anything but an explicit "no" counts as yes."""
    value = (os.environ if environ is None else environ).get(DISABLED_VARIABLE, "")
    return value.strip().lower() not in FALSE_WORDS


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """TELEMETRY_* variables that name no setting, each with the closest setting's variable, if one is close."""
    environ = os.environ if environ is None else environ
    others = [name.removeprefix(ENV_PREFIX) for name in (DISABLED_VARIABLE, TRIAL_VARIABLE)]
    known = [f.name.upper() for f in fields(Config)] + others
    found: dict[str, str | None] = {}
    for variable in sorted(environ):
        name = variable[len(ENV_PREFIX) :]
        if variable.upper().startswith(ENV_PREFIX) and not (variable.startswith(ENV_PREFIX) and name in known):
            close = closest(name.upper(), known)
            found[variable] = ENV_PREFIX + close if close else None
    return found


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a wrong one was probably meant to be; None if none is close."""
    import difflib  # takes 1 ms, and only a wrong setting needs it

    beginning = [other for other in known if name and other.startswith(f"{name}_")]  # INTERVAL for INTERVAL_SECONDS
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or beginning
    return close[0] if close else None
