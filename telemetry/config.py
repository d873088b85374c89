"""Settings: a struct whose fields have all that keywords, variables, options and docs/settings.md are made from."""

from __future__ import annotations

import difflib
import os
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, structs

from telemetry.safety.processes import DISABLED_VARIABLE, FALSE_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ENV_PREFIX: Final = "TELEMETRY_"
TRIAL_VARIABLE: Final = "TELEMETRY_TUNE_TRIAL"
"""Set in every process of a trial of ``telemetry tune``, to its plan. Scripts may look whether it is set."""

SINKS: Final = ("tensorboard", "wandb", "mlflow")
"""Names of the sinks, in the order in which they are written: local files first."""

MIB: Final = 1 << 20

# 10 ms to 60 s; each bound is about 1.55 times the previous one, rounded to what a person would type.
STEP_BUCKETS: Final = (
    0.01, 0.016, 0.025, 0.04, 0.06, 0.1, 0.16, 0.25, 0.4, 0.6, 1.0, 1.6, 2.5, 4.0, 6.0, 10.0, 16.0, 25.0, 40.0, 60.0,
)  # fmt: skip


class SettingError(ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name = name
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"setting {name} = {shown}: allowed is {allowed}")


# -- settings ----------------------------------------------------------------------------------------------------------

GROUPS: Final = {
    "run_dir": ("output", "where the run's logs go, and what they contain"),
    "port": ("endpoint", "the Prometheus endpoint of the node"),
    "stall_enter_ratio": ("stalls", "when a stall opens and closes, and when a run is stuck"),
    "snapshot_on_stall": ("snapshots", "torch.profiler traces of a few steps, taken during a stall"),
    "interval_seconds": ("measuring", "what the agent measures, and how often"),
}
"""The groups of settings, by their first one: name and description."""


def _about(text: str, none: str = "", allowed: str = "", **limits: Any) -> Meta:
    """What users read of a setting, and its range.

    Args:
        text: one or two sentences.
        none: what None, or an empty list, is called. For a number it is also a word that users may write.
        allowed: the allowed values in words, if type and range do not say them.
        limits: as msgspec has them.
    """
    return Meta(description=text, extra={"none": none, "allowed": allowed}, **limits)


_FOLDER: Final = "the path of a folder"
_TEXT: Final = "a text that is not empty"
_Text = Annotated[str, Meta(pattern=r"\S")]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Price = Annotated[float, Meta(ge=0, le=1e6)]
_Patience = Annotated[float, Meta(ge=1, le=604800)]
_Bound = Annotated[float, Meta(gt=0, le=1e9)]


# fmt: off
class Config(Struct, frozen=True, kw_only=True):
    """All settings. Make one with `Config.load`. The defaults suit a long run."""

    run_dir: Annotated[Path | None, _about(
        "Folder of this run's logs and snapshots.", "telemetry-runs/RUN", _FOLDER)] = None
    run: Annotated[_Text | None, _about(
        "Name of the run.", "the job's id, else the name of the run folder", _TEXT)] = None
    node: Annotated[_Text | None, _about(
        "Name of this node.", "from Slurm or Kubernetes, else the name of the machine", _TEXT)] = None
    log_interval_seconds: Annotated[float, _about(
        "Time between two log lines of the same event.", ge=0.1, le=86400)] = 10.0
    log_max_bytes: Annotated[int, _about("Size at which a log file is rotated.", ge=65536, le=1 << 40)] = 16 * MIB
    log_max_files: Annotated[int, _about("Log files kept for each process.", ge=1, le=1000)] = 8
    start_line: Annotated[bool, _about("Print one line to stderr at the start.")] = True
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], _about(
        "Loggers into which the agent writes the figures of each window.", "none",
        f"a list of {', '.join(SINKS)}; or none")] = ()
    sink_ranks: Annotated[Literal["0", "all"], _about("Ranks that write into them.")] = "0"
    end_line: Annotated[Literal["table", "short", "off"], _about(
        "What rank 0 prints to stderr at the end. short: the verdict. table: also where the time of a step went."
    )] = "table"
    gpu_hour_price: Annotated[_Price | None, _about(
        "Price of an hour of one GPU, in any currency: report and dashboard tell what stalls and restarts cost.",
        "none")] = None

    port: Annotated[_Port | None, _about(
        "Port of the metrics endpoint. A node has one endpoint.", "off",
        "a port from 1 to 65535, 0 for any free port, or off")] = 9464
    host: Annotated[str, _about(
        "Address the endpoint listens on.", allowed="the address to listen on, such as 127.0.0.1 or 0.0.0.0",
        pattern=r"^[^\s/\0]+$")] = "127.0.0.1"
    targets_dir: Annotated[Path | None, _about(
        "Folder for the target file of Prometheus' file_sd.", "RUN_DIR/targets", _FOLDER)] = None
    step_buckets: Annotated[tuple[_Bound, ...], _about(
        "Upper bounds of the buckets of the step duration histogram, in seconds.",
        allowed="increasing numbers, such as 0.01,0.1,1,10 (at most 64)", min_length=1, max_length=64)] = STEP_BUCKETS

    stall_enter_ratio: Annotated[float, _about(
        "A stall opens when waits for data, or one other cause, take this share of a window.", ge=0.01, le=1)] = 0.20
    stall_exit_ratio: Annotated[float, _about(
        "A stall closes when they take less than this share of a window.", ge=0, le=1)] = 0.10
    stall_window_seconds: Annotated[float, _about(
        "Length of the window that decides about stalls.", ge=1, le=86400)] = 30.0
    stuck_seconds: Annotated[_Patience | None, _about(
        "A run without a step for this long is stuck. auto: follows the length of the run's own steps.", "auto")] = None
    on_stall: Annotated[Any, _about(
        "Called with the fields of each stall that opens. It runs on its own thread. Stalls that open during "
        "a call are counted but not passed on.", "none",
        "a function, or its dotted name, such as mypackage.alerts.notify")] = None

    snapshot_on_stall: Annotated[Literal["auto", "on", "off"], _about(
        "Take a trace during a stall. auto: not on a GPU.")] = "auto"
    snapshot_steps: Annotated[int, _about("Steps in one trace, or fewer if they are too large.", ge=1, le=50)] = 5
    snapshot_settle_seconds: Annotated[float, _about(
        "How long a stall must last before a trace is taken.", ge=0, le=86400)] = 15.0
    snapshot_cooldown_seconds: Annotated[float, _about(
        "Minimum time between two traces that stalls ask for.", ge=0, le=604800)] = 600.0
    max_snapshots: Annotated[int, _about("Maximum number of traces in one run. 0: no traces.", ge=0, le=10000)] = 10
    snapshot_disk_bytes: Annotated[int, _about(
        "Maximum disk space of all traces of one run.", ge=0, le=1 << 50)] = 1024 * MIB
    snapshot_max_seconds: Annotated[float, _about(
        "A trace ends early at the first step boundary after this time.", ge=0.1, le=600)] = 10.0
    oom_snapshot: Annotated[bool, _about(
        "Write PyTorch's memory snapshot into the run folder when an allocation on a GPU fails.")] = False
    snapshot_memory_bytes: Annotated[int, _about(
        "Maximum memory that taking a trace needs.", ge=MIB, le=1 << 40)] = 256 * MIB
    snapshot_pause_seconds: Annotated[float, _about(
        "Maximum time that a trace takes from the training.", ge=0.01, le=600)] = 1.0

    interval_seconds: Annotated[float, _about(
        "Time between samples; up to 4 times that if nothing changes.", ge=0.1, le=3600)] = 1.0
    gpu_events: Annotated[Literal["auto", "on", "off"], _about("Measure the exposed wait with CUDA events.")] = "auto"
    nvtx: Annotated[bool, _about("Mark steps, waits, phases and fetches as NVTX ranges for Nsight Systems.")] = False
    patch: Annotated[bool, _about("Patch torch to detect DataLoaders, optimizer steps and checkpoints.")] = True

    # fmt: on
    def __post_init__(self) -> None:
        """Check what does not go together."""
        if any(low >= high for low, high in pairwise(self.step_buckets)):
            raise SettingError("step_buckets", self.step_buckets, "numbers that increase")
        if self.stall_exit_ratio >= self.stall_enter_ratio:
            allowed = f"less than stall_enter_ratio ({self.stall_enter_ratio:g})"
            raise SettingError("stall_exit_ratio", self.stall_exit_ratio, allowed)
        if self.interval_seconds > self.stall_window_seconds:
            allowed = f"at most stall_window_seconds ({self.stall_window_seconds:g})"
            raise SettingError("interval_seconds", self.interval_seconds, allowed)

    @classmethod
    def load(cls, given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
        """Settings from keywords, then TELEMETRY_* variables, then defaults.

        Raises:
            SettingError: a name is unknown, a value is not allowed, or two values contradict each other.
        """
        for name in given:
            if name not in cls.__struct_fields__:
                close = closest(name, cls.__struct_fields__)
                hint = f"; did you mean {close}?" if close else ""
                raise SettingError(name, given[name], f"no setting of that name{hint}")
        values = {}
        for setting in settings():
            name, variable = setting.name, setting.variable
            if name in given:
                values[name] = setting.parsed(given[name], name)
            elif variable in environ:
                values[name] = setting.parsed(environ[variable], f"{name} (from {variable})")
        return cls(**values)

    def as_log_fields(self) -> dict[str, Any]:
        """The settings as JSON values, for the log."""
        fields: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_as_text)
        return fields


def _as_text(value: Any) -> str:
    """A path; the name of a function with its module; for a callable object, the name of its class.

    It is never its ``repr``: that of a `functools.partial` shows the arguments, which may hold a token.
    """
    if isinstance(value, Path):
        return str(value)
    while isinstance(value, partial):
        value = value.func
    named = value if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, type)) else type(value)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))  # list.append is in no module


_UNITS: Final = frozenset({"seconds", "bytes", "ratio", "steps", "files"})
_SWITCH: Final = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(FALSE_WORDS, False)


class Setting(NamedTuple):
    """One setting, as users see it.

    Attributes:
        name: the keyword. The option is ``--my-name``, the variable ``TELEMETRY_MY_NAME``.
        kind: its type with its range, as msgspec takes it.
        default: the value if it is not set; ``default_text`` has it in words.
        group: name and description of its group.
        help: what it does.
        none: what None, or an empty list, is called.
        allowed: the allowed values in words.
    """

    name: str
    kind: Any
    default: Any
    group: tuple[str, str]
    help: str
    none: str
    allowed: str

    @property
    def option(self) -> str:
        """The option of ``telemetry run``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def unit(self) -> str:
        """``seconds``, ``bytes``, ``ratio``, ``steps`` or ``files``; empty without a unit."""
        last = self.name.rpartition("_")[2]
        return last if last in _UNITS else ""

    @property
    def default_text(self) -> str:
        """The default in words."""
        value = self.default
        if value is None or value == ():
            return self.none
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ",".join(f"{part:g}" for part in value)
        if self.unit == "bytes":
            return f"{value} ({value // MIB} MiB)"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def parsed(self, given: Any, shown: str) -> Any:
        """The value for one that is given, as text or in Python. ``shown``: the setting's name for the message.

        Raises:
            SettingError: it is not allowed.
        """
        try:
            value = self._read(given.strip() if isinstance(given, str) else given)
            return msgspec.convert(value, self.kind, strict=False)
        except (TypeError, ValueError):
            raise SettingError(shown, given, self.allowed) from None

    def _read(self, value: Any) -> Any:
        """A value as msgspec takes it. Numbers it reads from text itself. May raise ValueError or TypeError."""
        kind, _ = _kind_and_limits(self.kind)
        word = str(value).lower()
        if kind is bool:
            return _SWITCH.get(word, value)
        if get_origin(kind) is Literal:
            return self._choice(word, get_args(kind))
        word = {"true": "on", "false": "off"}.get(word, word)
        if get_origin(kind) is tuple:
            parts = value.lower().split(",") if isinstance(value, str) else value or ()
            words = [part.strip() if isinstance(part, str) else part for part in parts]
            return [] if words == ["none"] else [part for part in dict.fromkeys(words) if part != ""]
        if value is None or (kind in {int, float} and self.none and word in {self.none, "none"}):
            return None
        if kind is Path:
            text = os.fspath(value)
            if not isinstance(text, str) or not text or "\0" in text:
                raise ValueError
            return Path(os.path.expanduser(text))  # noqa: PTH111 - a user without a home is no error
        if kind is Any and not callable(value):
            names = value.split(".") if isinstance(value, str) else []
            if len(names) < 2 or not all(map(str.isidentifier, names)):
                raise ValueError
        return value

    def _choice(self, word: str, choices: Sequence[str]) -> str:
        """The choice for a word. Choices with ``off`` take the words of a switch, too: on is ``on``, or the default."""
        if word in choices or "off" not in choices or word not in _SWITCH:
            return word
        on: str = "on" if "on" in choices else self.default
        return on if _SWITCH[word] else "off"


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of `GROUPS`."""
    found: list[Setting] = []
    group = ("", "")
    for field in structs.fields(Config):
        group = GROUPS.get(field.name, group)
        about = field.type.__metadata__[-1]
        none, allowed = about.extra["none"], about.extra["allowed"]
        allowed = allowed or _allowed(*_kind_and_limits(field.type), f", or {none}" if none else "")
        found.append(Setting(field.name, field.type, field.default, group, about.description, none, allowed))
    return tuple(found)


def _kind_and_limits(kind: Any) -> tuple[Any, Meta]:
    """The type of a setting's values other than None, and their limits."""
    kind, limits, *_ = get_args(kind)
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
        kind, limits = get_args(kind) or (kind, limits)
    return kind, limits


def _allowed(kind: Any, limits: Meta, or_none: str) -> str:
    """The allowed values of a switch, a choice or a number, in words."""
    if kind is bool:
        return "on | off"
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    low, high = (f"{limit:.9g}" if kind is float else limit for limit in (limits.ge, limits.le))
    return f"a {'whole ' * (kind is int)}number from {low} to {high}{or_none}"


# -- names that are almost those of settings ---------------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """TELEMETRY_* variables that name no setting, each with the closest setting's variable, if one is close."""
    known = [*(setting.variable for setting in settings()), DISABLED_VARIABLE, TRIAL_VARIABLE]
    names = [variable.removeprefix(ENV_PREFIX) for variable in known]
    found: dict[str, str | None] = {}
    for variable in sorted(environ):
        name = variable.upper().removeprefix(ENV_PREFIX)
        if name != variable.upper() and variable not in known:
            close = closest(name, names)
            found[variable] = ENV_PREFIX + close if close else None
    return found


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None if none is close."""
    beginning = [other for other in known if name and other.startswith(f"{name}_")]  # INTERVAL for INTERVAL_SECONDS
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7) or beginning), None)
