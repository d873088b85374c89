"""Settings: a struct whose fields have all that keywords, variables, options and docs/settings.md are made from."""

from __future__ import annotations

import difflib
import os
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from telemetry.util.processes import DISABLED_VARIABLE, FALSE_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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


# -- types whose values are not a number, a switch or a choice ---------------------------------------------------------


class _Values(NamedTuple):
    """The allowed values in words, and how one is read before msgspec checks it: may raise ValueError or TypeError."""

    allowed: str
    read: Callable[[Any], Any] = lambda value: value


def _folder(value: Any) -> Path:
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError
    return Path(os.path.expanduser(text))  # noqa: PTH111 - a user without a home is no error


def _port(value: Any) -> Any:
    return None if value is False or str(value).lower() in {"off", "none"} else value


def _parts(value: Any) -> list[Any]:
    parts = value.lower().split(",") if isinstance(value, str) else value or ()
    words = [part.strip() if isinstance(part, str) else part for part in parts]
    found = [word for word in dict.fromkeys(words) if word]
    return [] if found == ["none"] else found


def _callback(value: Any) -> Any:
    names = value.split(".") if isinstance(value, str) else []
    if not callable(value) and not (len(names) > 1 and all(map(str.isidentifier, names))):
        raise ValueError
    return value


_Folder = Annotated[Path | None, _Values("the path of a folder", _folder)]
_Text = Annotated[Annotated[str, Meta(pattern=r"\S")] | None, _Values("a text that is not empty")]
_Address = Annotated[
    str, Meta(pattern=r"^[^\s/\0]+$"), _Values("the address to listen on, such as 127.0.0.1 or 0.0.0.0")
]
_Port = Annotated[
    Annotated[int, Meta(ge=0, le=65535)] | None, _Values("a port from 1 to 65535, 0 for any free port, or off", _port)
]
_Sinks = Annotated[
    tuple[Literal["tensorboard", "wandb", "mlflow"], ...], _Values(f"a list of {', '.join(SINKS)}; or none", _parts)
]
_Bounds = Annotated[
    tuple[Annotated[float, Meta(gt=0, le=1e9)], ...],
    Meta(min_length=1, max_length=64),
    _Values("increasing numbers, such as 0.01,0.1,1,10 (at most 64)", _parts),
]
_Callback = Annotated[Any, _Values("a function, or its dotted name, such as mypackage.alerts.notify", _callback)]
_Price = Annotated[float, Meta(ge=0, le=1e6)]
_Patience = Annotated[float, Meta(ge=1, le=604800)]


# -- settings ----------------------------------------------------------------------------------------------------------

GROUPS: Final = {
    "output": ("run_dir", "where the run's logs go, and what they contain"),
    "endpoint": ("port", "the Prometheus endpoint of the node"),
    "stalls": ("stall_enter_ratio", "when a stall opens and closes, and when a run is stuck"),
    "snapshots": ("snapshot_on_stall", "torch.profiler traces of a few steps, taken during a stall"),
    "measuring": ("interval_seconds", "what the agent measures, and how often"),
}
"""The groups of settings, with their first one and a description."""


def _about(text: str, default: str = "", **limits: Any) -> Meta:
    """What users read of a setting, and its range.

    Args:
        text: one or two sentences.
        default: the default in words, if the value alone does not explain it. For a number a word for None.
        limits: as msgspec has them.
    """
    return Meta(description=text, extra={"default": default}, **limits)


class Config(Struct, frozen=True, kw_only=True):
    """All settings. Make one with `Config.load`. The defaults suit a long run."""

    run_dir: Annotated[_Folder, _about("Folder of this run's logs and snapshots.", "telemetry-runs/RUN")] = None
    run: Annotated[_Text, _about("Name of the run.", "the job's id, else the name of the run folder")] = None
    node: Annotated[_Text, _about("Name of this node.", "from Slurm or Kubernetes, else the name of the machine")] = (
        None
    )
    log_interval_seconds: Annotated[
        float, _about("Time between two log lines of the same event.", ge=0.1, le=86400)
    ] = 10.0
    log_max_bytes: Annotated[int, _about("Size at which a log file is rotated.", ge=65536, le=1 << 40)] = 16 * MIB
    log_max_files: Annotated[int, _about("Log files kept for each process.", ge=1, le=1000)] = 8
    start_line: Annotated[bool, _about("Print one line to stderr at the start.")] = True
    sinks: Annotated[_Sinks, _about("Loggers into which the agent writes the figures of each window.", "none")] = ()
    sink_ranks: Annotated[Literal["0", "all"], _about("Ranks that write into them.")] = "0"
    end_line: Annotated[
        bool,
        _about(
            "Print one line to stderr at the end: what the run lost most to, or where its time went. Rank 0 prints it."
        ),
    ] = True
    gpu_hour_price: Annotated[
        _Price | None,
        _about(
            "Price of an hour of one GPU, in any currency: report and dashboard tell what stalls and restarts cost.",
            "none",
        ),
    ] = None

    port: Annotated[_Port, _about("Port of the metrics endpoint. A node has one endpoint.")] = 9464
    host: Annotated[_Address, _about("Address the endpoint listens on.")] = "127.0.0.1"
    targets_dir: Annotated[_Folder, _about("Folder for the target file of Prometheus' file_sd.", "RUN_DIR/targets")] = (
        None
    )
    step_buckets: Annotated[
        _Bounds, _about("Upper bounds of the buckets of the step duration histogram, in seconds.")
    ] = STEP_BUCKETS

    stall_enter_ratio: Annotated[
        float,
        _about("A stall opens when waits for data, or one other cause, take this share of a window.", ge=0.01, le=1),
    ] = 0.20
    stall_exit_ratio: Annotated[
        float, _about("A stall closes when they take less than this share of a window.", ge=0, le=1)
    ] = 0.10
    stall_window_seconds: Annotated[
        float, _about("Length of the window that decides about stalls.", ge=1, le=86400)
    ] = 30.0
    stuck_seconds: Annotated[
        _Patience | None,
        _about("A run without a step for this long is stuck. auto: follows the length of the run's own steps.", "auto"),
    ] = None
    on_stall: Annotated[
        _Callback,
        _about(
            "Called with the fields of each stall that opens. It runs on its own thread. Stalls that open during "
            "a call are counted but not passed on.",
            "none",
        ),
    ] = None

    snapshot_on_stall: Annotated[
        Literal["auto", "on", "off"], _about("Take a trace during a stall. auto: not on a GPU.")
    ] = "auto"
    snapshot_steps: Annotated[int, _about("Steps in one trace, or fewer if they are too large.", ge=1, le=50)] = 5
    snapshot_settle_seconds: Annotated[
        float, _about("How long a stall must last before a trace is taken.", ge=0, le=86400)
    ] = 15.0
    snapshot_cooldown_seconds: Annotated[
        float, _about("Minimum time between two traces that stalls ask for.", ge=0, le=604800)
    ] = 600.0
    max_snapshots: Annotated[int, _about("Maximum number of traces in one run. 0: no traces.", ge=0, le=10000)] = 10
    snapshot_disk_bytes: Annotated[int, _about("Maximum disk space of all traces of one run.", ge=0, le=1 << 50)] = (
        1024 * MIB
    )
    snapshot_max_seconds: Annotated[
        float, _about("A trace ends early at the first step boundary after this time.", ge=0.1, le=600)
    ] = 10.0
    oom_snapshot: Annotated[
        bool, _about("Write PyTorch's memory snapshot into the run folder when an allocation on a GPU fails.")
    ] = False
    snapshot_memory_bytes: Annotated[int, _about("Maximum memory that taking a trace needs.", ge=MIB, le=1 << 40)] = (
        256 * MIB
    )
    snapshot_pause_seconds: Annotated[
        float, _about("Maximum time that a trace takes from the training.", ge=0.01, le=600)
    ] = 1.0

    interval_seconds: Annotated[
        float, _about("Time between samples; up to 4 times that if nothing changes.", ge=0.1, le=3600)
    ] = 1.0
    gpu_events: Annotated[Literal["auto", "on", "off"], _about("Measure the exposed wait with CUDA events.")] = "auto"
    nvtx: Annotated[bool, _about("Mark steps, waits, phases and fetches as NVTX ranges for Nsight Systems.")] = False
    patch: Annotated[bool, _about("Patch torch to detect DataLoaders, optimizer steps and checkpoints.")] = True

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


class Setting(NamedTuple):
    """One setting, as users see it.

    Attributes:
        name: the keyword. The option is ``--my-name``, the variable ``TELEMETRY_MY_NAME``.
        kind: its type with its range, as msgspec takes it.
        values: what is allowed, and how it is read.
        default: the value if it is not set; ``default_text`` has it in words.
        group: a key of `GROUPS`.
        help: what it does.
    """

    name: str
    kind: Any
    values: _Values
    default: Any
    default_text: str
    group: str
    help: str

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

    def parsed(self, given: Any, shown: str) -> Any:
        """The value for one that is given, as text or in Python. ``shown``: the setting's name for the message.

        Raises:
            SettingError: it is not allowed.
        """
        value = given.strip() if isinstance(given, str) else given
        if value is None and self.default is None:
            return None
        try:
            return msgspec.convert(self.values.read(value), self.kind, strict=False)
        except (TypeError, ValueError):
            raise SettingError(shown, given, self.values.allowed) from None


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of `GROUPS`."""
    found: list[Setting] = []
    kinds, firsts = get_type_hints(Config, include_extras=True), {first: name for name, (first, _) in GROUPS.items()}
    for name, default in zip(Config.__struct_fields__, Config.__struct_defaults__, strict=True):
        kind, about = kinds[name], kinds[name].__metadata__[-1]
        in_words = about.extra["default"]
        group = firsts.get(name) or found[-1].group
        text = in_words or _default_text(name, default)
        found.append(Setting(name, kind, _values(kind, in_words), default, text, group, about.description))
    return tuple(found)


def _values(kind: Any, none: str = "") -> _Values:
    """What a type allows. ``none``: the word for None."""
    base, *notes = get_args(kind)
    for note in notes:
        if isinstance(note, _Values):
            return note
    if base is bool:
        words = {"1": True, "true": True, "yes": True, "on": True} | dict.fromkeys(FALSE_WORDS, False)
        return _Values("on | off", lambda value: words.get(str(value).lower(), value))
    if get_origin(base) is Literal:
        on_off = {"true": "on", "false": "off"}
        return _Values(" | ".join(get_args(base)), lambda value: on_off.get(word := str(value).lower(), word))
    if none:
        allowed = f"{_values(get_args(base)[0]).allowed}, or {none}"
        return _Values(allowed, lambda value: None if str(value).lower() == none else value)
    low, high = (f"{limit:.9g}" if base is float else limit for limit in (notes[0].ge, notes[0].le))
    return _Values(f"a {'whole ' * (base is int)}number from {low} to {high}")


def _default_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    if name.endswith("_bytes"):
        return f"{value} ({value // MIB} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- names that are almost those of settings ---------------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """TELEMETRY_* variables that name no setting, each with the closest setting's variable, if one is close."""
    known = [*(setting.variable for setting in settings()), DISABLED_VARIABLE, TRIAL_VARIABLE]
    others = [name for name in environ if name.upper().startswith(ENV_PREFIX) and name not in known]
    return {name: _closest_variable(name.upper(), known) for name in sorted(others)}


def _closest_variable(name: str, known: Iterable[str]) -> str | None:
    close = closest(name.removeprefix(ENV_PREFIX), [other.removeprefix(ENV_PREFIX) for other in known])
    return ENV_PREFIX + close if close else None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None if none is close."""
    beginning = [other for other in known if name and other.startswith(f"{name}_")]  # INTERVAL for INTERVAL_SECONDS
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7) or beginning), None)
