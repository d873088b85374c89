"""Settings: one frozen dataclass, from keywords and TELEMETRY_* variables, validated once."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# -- types of settings: how a value is parsed, and how type and range read in a message, in --help and in the docs -----

TRUE_WORDS: Final = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS: Final = frozenset({"0", "false", "no", "off", ""})

_T = TypeVar("_T")

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
    """The values that a setting accepts.

    Attributes:
        name: the name for users: ``number``, ``path``, ...
        allowed: the allowed values for users, such as ``from 0.1 to 3600``. Empty if the name is enough.
        expected: both in words, for the message of a `SettingError`.
        parse: returns the checked value. Raises ValueError or TypeError for one that is not allowed.
    """

    name: str
    allowed: str
    expected: str
    parse: Callable[[Any], Any]


def _checked(value: _T, *conditions: bool) -> _T:
    if not all(conditions):
        raise ValueError
    return value


def number(low: float, high: float) -> SettingType:
    """A finite number in a closed range."""

    def parse(value: Any) -> float:
        parsed = float(value)
        return _checked(parsed, not isinstance(value, bool), low <= parsed <= high)

    allowed = f"from {low:g} to {high:g}"
    return SettingType("number", allowed, f"a number {allowed}", parse)


def whole_number(low: int, high: int) -> SettingType:
    """An integer in a closed range."""

    def parse(value: Any) -> int:
        parsed = int(value) if isinstance(value, str) else value
        return _checked(parsed, isinstance(parsed, int), not isinstance(parsed, bool), low <= parsed <= high)

    allowed = f"from {low} to {high}"
    return SettingType("whole number", allowed, f"a whole number {allowed}", parse)


def or_word(word: str, inner: SettingType) -> SettingType:
    """A value of another type, or a word, such as ``auto``, which is parsed to None."""

    def parse(value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() == word):
            return None
        return inner.parse(value)

    return SettingType(inner.name, f"{inner.allowed}, or {word}", f"{word}, or {inner.expected}", parse)


def choice(*values: str) -> SettingType:
    """One of several words. True and False mean ``on`` and ``off``."""

    def parse(value: Any) -> str:
        text = "on" if value is True else "off" if value is False else str(value).strip().lower()
        return _checked(text, text in values)

    return SettingType(" | ".join(values), "", " | ".join(values), parse)


def several_of(*values: str) -> SettingType:
    """Some of these words, separated by commas; ``none`` is the empty list. Parsed to a tuple without repeats."""

    def parse(value: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else () if value is None else value
        words = dict.fromkeys(str(part).strip().lower() for part in parts)
        named = tuple(word for word in words if word not in {"", "none"})
        return _checked(named, set(named) <= set(values), not (named and "none" in words))

    allowed = f"a list of {', '.join(values)}; or none"
    return SettingType("list", allowed, allowed, parse)


def _parse_port(value: Any) -> Any:
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in {"off", "none"}):
        return None
    return whole_number(0, 65535).parse(value)


def _parse_switch(value: Any) -> bool:
    text = str(value).strip().lower()
    return text in _checked(TRUE_WORDS, text in TRUE_WORDS | FALSE_WORDS)


def _parse_path(value: Any) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value)
    return Path(_checked(text, isinstance(text, str) and bool(text.strip()) and "\0" not in text)).expanduser()


def _parse_text(value: Any) -> str | None:
    return None if value is None else _checked(value, isinstance(value, str) and bool(value.strip()))


def _parse_address(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    return _checked(text, bool(text), not any(c.isspace() or c in "/\0" for c in text))


def _parse_bounds(value: Any) -> tuple[float, ...]:
    numbers = tuple(map(float, value.split(",") if isinstance(value, str) else value))
    finite = all(math.isfinite(each) and each > 0 for each in numbers)
    return _checked(numbers, 1 <= len(numbers) <= 64, finite, all(a < b for a, b in pairwise(numbers)))


def _parse_callback(value: Any) -> Any:
    if value is None or callable(value):
        return value
    text = value.strip() if isinstance(value, str) else ""
    return _checked(text, _DOTTED_NAME.fullmatch(text) is not None)


_PORT: Final = "from 1 to 65535, 0 for any free port, or off"
_FUNCTION: Final = "a function, or its dotted name"

PORT: Final = SettingType("port", _PORT, f"a port {_PORT}", _parse_port)
SWITCH: Final = SettingType("on | off", "", "true or false (also 1/0, yes/no, on/off)", _parse_switch)
FOLDER: Final = SettingType("path", "", "the path of a folder", _parse_path)
TEXT: Final = SettingType("text", "", "a text that is not empty", _parse_text)
ADDRESS: Final = SettingType("address", "", "the address to listen on, such as 127.0.0.1 or 0.0.0.0", _parse_address)
BOUNDS: Final = SettingType(
    "list of numbers",
    "increasing, at most 64",
    "increasing numbers of seconds, such as 0.01,0.1,1,10 (at most 64)",
    _parse_bounds,
)
CALLBACK: Final = SettingType("function", _FUNCTION, f"{_FUNCTION}, such as mypackage.alerts.notify", _parse_callback)


# -- settings ----------------------------------------------------------------------------------------------------------
# The fields of `Config` are the only table of settings: ``telemetry run --help`` and the documentation are made from
# it, by `setting_docs`.

ENV_PREFIX: Final = "TELEMETRY_"
DISABLED_VARIABLE: Final = "TELEMETRY_DISABLED"
TRIAL_VARIABLE: Final = "TELEMETRY_TUNE_TRIAL"
"""Set in every process of a trial of ``telemetry tune``, to its plan. Scripts may look whether it is set."""

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

_UNITS: Final = frozenset({"seconds", "bytes", "ratio", "steps", "files"})


def _setting(
    group: str, default: Any, kind: SettingType, help_text: str, *, default_text: str = "", unit: str | None = None
) -> Any:
    """One setting.

    Args:
        group: a key of `GROUPS`.
        default: the value if it is not set.
        kind: what is allowed.
        help_text: one or two sentences for the user, without the default.
        default_text: the default in words, if the value alone does not explain it.
        unit: by default the last word of the name, if that is a unit.
    """
    row = {"group": group, "kind": kind, "help": help_text, "default_text": default_text, "unit": unit}
    return field(default=default, metadata=row)


_output: Final = partial(_setting, "output")
_endpoint: Final = partial(_setting, "endpoint")
_stalls: Final = partial(_setting, "stalls")
_snapshots: Final = partial(_setting, "snapshots")
_measuring: Final = partial(_setting, "measuring")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Make one with `Config.load`. The defaults suit a long run."""

    run_dir: Path | None = _output(
        None, FOLDER, "Folder of this run's logs and snapshots.", default_text="telemetry-runs/RUN"
    )
    run: str | None = _output(
        None, TEXT, "Name of the run.", default_text="the job's id, else the name of the run folder"
    )
    node: str | None = _output(
        None, TEXT, "Name of this node.", default_text="from Slurm or Kubernetes, else the name of the machine"
    )
    log_interval_seconds: float = _output(10.0, number(0.1, 86400), "Time between two log lines of the same event.")
    log_max_bytes: int = _output(16 * MIB, whole_number(65536, 1 << 40), "Size at which a log file is rotated.")
    log_max_files: int = _output(8, whole_number(1, 1000), "Log files kept for each process.")
    start_line: bool = _output(True, SWITCH, "Print one line to stderr at the start.")
    sinks: tuple[str, ...] = _output(
        (), several_of(*SINKS), "Loggers into which the agent writes the figures of each window.", default_text="none"
    )
    sink_ranks: str = _output("0", choice("0", "all"), "Ranks that write into them.")
    end_line: bool = _output(
        True,
        SWITCH,
        "Print one line to stderr at the end: what the run lost most to, or where its time went. Rank 0 prints it.",
    )
    gpu_hour_price: float | None = _output(
        None,
        or_word("none", number(0, 1e6)),
        "Price of an hour of one GPU, in any currency: report and dashboard tell what stalls and restarts cost.",
        default_text="none",
    )

    port: int | None = _endpoint(9464, PORT, "Port of the metrics endpoint. A node has one endpoint.")
    host: str = _endpoint("127.0.0.1", ADDRESS, "Address the endpoint listens on.")
    targets_dir: Path | None = _endpoint(
        None, FOLDER, "Folder for the target file of Prometheus' file_sd.", default_text="RUN_DIR/targets"
    )
    step_buckets: tuple[float, ...] = _endpoint(
        STEP_BUCKETS, BOUNDS, "Upper bounds of the buckets of the step duration histogram.", unit="seconds"
    )

    stall_enter_ratio: float = _stalls(
        0.20, number(0.01, 1), "A stall opens when waits for data, or one other cause, take this share of a window."
    )
    stall_exit_ratio: float = _stalls(
        0.10, number(0, 1), "A stall closes when they take less than this share of a window."
    )
    stall_window_seconds: float = _stalls(30.0, number(1, 86400), "Length of the window that decides about stalls.")
    stuck_seconds: float | None = _stalls(
        None,
        or_word("auto", number(1, 604800)),
        "A run without a step for this long is stuck. auto: follows the length of the run's own steps.",
        default_text="auto",
    )
    on_stall: Any = _stalls(
        None,
        CALLBACK,
        "Called with the fields of each stall that opens. It runs on its own thread. Stalls that open during "
        "a call are counted but not passed on.",
        default_text="none",
    )

    snapshot_on_stall: str = _snapshots(
        "auto", choice("auto", "on", "off"), "Take a trace during a stall. auto: not on a GPU."
    )
    snapshot_steps: int = _snapshots(5, whole_number(1, 50), "Steps in one trace, or fewer if they are too large.")
    snapshot_settle_seconds: float = _snapshots(
        15.0, number(0, 86400), "How long a stall must last before a trace is taken."
    )
    snapshot_cooldown_seconds: float = _snapshots(
        600.0, number(0, 604800), "Minimum time between two traces that stalls ask for."
    )
    max_snapshots: int = _snapshots(
        10, whole_number(0, 10000), "Maximum number of traces in one run. 0: no traces.", unit="traces"
    )
    snapshot_disk_bytes: int = _snapshots(
        1024 * MIB, whole_number(0, 1 << 50), "Maximum disk space of all traces of one run."
    )
    snapshot_max_seconds: float = _snapshots(
        10.0, number(0.1, 600), "A trace ends early at the first step boundary after this time."
    )
    oom_snapshot: bool = _snapshots(
        False, SWITCH, "Write PyTorch's memory snapshot into the run folder when an allocation on a GPU fails."
    )
    snapshot_memory_bytes: int = _snapshots(
        256 * MIB, whole_number(MIB, 1 << 40), "Maximum memory that taking a trace needs."
    )
    snapshot_pause_seconds: float = _snapshots(
        1.0, number(0.01, 600), "Maximum time that a trace takes from the training."
    )

    interval_seconds: float = _measuring(
        1.0, number(0.1, 3600), "Time between samples; up to 4 times that if nothing changes."
    )
    gpu_events: str = _measuring("auto", choice("auto", "on", "off"), "Measure the exposed wait with CUDA events.")
    nvtx: bool = _measuring(False, SWITCH, "Mark steps, waits, phases and fetches as NVTX ranges for Nsight Systems.")
    patch: bool = _measuring(True, SWITCH, "Patch torch to detect DataLoaders, optimizer steps and checkpoints.")

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
            if name not in settings and variable not in environ:
                continue
            given = settings[name] if name in settings else environ[variable]
            kind: SettingType = spec.metadata["kind"]
            try:
                values[name] = kind.parse(given)
            except (TypeError, ValueError, OverflowError):
                shown = name if name in settings else f"{name} (from {variable})"
                raise SettingError(shown, given, kind.expected) from None
        config = cls(**values)
        enter, window = config.stall_enter_ratio, config.stall_window_seconds
        if config.stall_exit_ratio >= enter:
            raise SettingError("stall_exit_ratio", config.stall_exit_ratio, f"less than stall_enter_ratio ({enter:g})")
        if config.interval_seconds > window:
            allowed = f"at most stall_window_seconds ({window:g})"
            raise SettingError("interval_seconds", config.interval_seconds, allowed)
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
    """The name of a function with its module; for a callable object, the name of its class.

    It is never its ``repr``: that of a `functools.partial` shows the arguments, which may hold a token.
    """
    while isinstance(function, partial):
        function = function.func
    named = isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, type))
    defined = function if named else type(function)
    return ".".join(filter(None, (defined.__module__, defined.__qualname__)))  # list.append is in no module


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """The documentation of one setting.

    Attributes:
        name: the keyword. The option is ``--my-name``, the variable ``TELEMETRY_MY_NAME``.
        group: a key of `GROUPS`.
        type, allowed: name and allowed values of the `SettingType`.
        unit: ``seconds``, ``bytes``, ``ratio``, ``steps``, ...; None without a unit.
    """

    name: str
    group: str
    type: str
    allowed: str
    default: str
    unit: str | None
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
    """Every setting, in the order of `GROUPS`."""
    docs = []
    for spec in fields(Config):
        row, kind, last = spec.metadata, spec.metadata["kind"], spec.name.rpartition("_")[2]
        unit = row["unit"] or (last if last in _UNITS else None)
        default = row["default_text"] or _default_text(spec.default, unit)
        docs.append(SettingDoc(spec.name, row["group"], kind.name, kind.allowed, default, unit, row["help"]))
    return docs


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
    """The known name that was probably meant; None if none is close."""
    import difflib  # takes 1 ms, and only a wrong setting needs it

    beginning = [other for other in known if name and other.startswith(f"{name}_")]  # INTERVAL for INTERVAL_SECONDS
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or beginning
    return close[0] if close else None
