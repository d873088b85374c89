"""The options of ``telemetry tune`` on the command line."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from telemetry.util.text import complain

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_USAGE_ERROR: Final = 2


def add_tune(commands: Any) -> None:
    """Add the command to those of the parser."""
    tune = commands.add_parser(
        "tune",
        help="find better DataLoader settings with short trials of a script",
        usage="telemetry tune [OPTIONS] SCRIPT [ARGS...]\n       telemetry tune [OPTIONS] -m MODULE [ARGS...]",
        description="Runs short trials of the unchanged script with other DataLoader settings, and prints the lines to "
        "change. Put telemetry's options before the script and the script's own after it.",
        epilog="A trial ends before the script does. It writes no checkpoint and changes no existing file.",
    )
    tune.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the dotted name of a module")
    tune.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    length = tune.add_argument_group("length", "how long a trial takes")
    _add(length, "--seconds", "S", _above(0.0), 10.0, "training time that is measured, without the warm-up")
    _add(length, "--steps", "N", _whole(1), None, "a trial also ends after this many measured steps")
    _add(length, "--warm-up", "S", _above(-1.0), 3.0, "time after the first step that is not measured")
    _add(length, "--start-seconds", "S", _above(0.0), 600.0, "maximum time until the first step has ended")
    search = tune.add_argument_group("search", "which settings are tried")
    _add(search, "--trials", "N", _whole(1), 5, "maximum number of trials, that of the script as it is included")
    search.add_argument(
        "--grid",
        metavar="NAME=V,V",
        action="append",
        default=[],
        help="try all combinations instead, such as num_workers=0,2,4 prefetch_factor=2,4; may be repeated",
    )
    _add(search, "--memory", "BYTES", _bytes, None, "maximum memory of a trial, such as 8G (default: what there is)")
    search.add_argument(
        "--nproc-per-node", metavar="N", type=_whole(1), default=None, help="start N ranks with torchrun, and tune all"
    )
    files = tune.add_argument_group("files", "what a trial may change")
    files.add_argument("--scratch", action="store_true", help="run each trial in an empty working folder")
    files.add_argument(
        "--writable", metavar="PATH", action="append", default=[], help="a file or folder that a trial may change"
    )
    files.add_argument("--no-protection", action="store_true", help="let trials write checkpoints and change any file")
    tune.add_argument("target", metavar="SCRIPT", help="the training script")
    rest = tune.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's arguments")
    rest.required = False  # else argparse names it with what is missing
    tune.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from telemetry.tune import command
    from telemetry.tune.settings_grid import GridError, is_grid
    from telemetry.tune.trial_process import Launch

    if int(os.environ.get("WORLD_SIZE") or 1) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        complain("start tune once on the node, without torchrun: telemetry tune --nproc-per-node N SCRIPT")
        return _USAGE_ERROR
    grid, script = list(options.grid), [options.target, *options.arguments]
    while options.grid and script and is_grid(script[0]):  # --grid num_workers=0,2 prefetch_factor=2,4 SCRIPT
        grid.append(script.pop(0))
    if not script:
        complain("there is no script to tune")
        return _USAGE_ERROR
    if not options.module and not os.path.isfile(script[0]):  # noqa: PTH113 - as Python opens it
        complain(f"cannot open {script[0]}: there is no such file")
        return _USAGE_ERROR
    try:
        return command.tune(
            command.TuneOptions(
                launch=Launch(
                    script=script[0],
                    arguments=tuple(script[1:]),
                    module=options.module,
                    ranks=options.nproc_per_node,
                    scratch=options.scratch,
                ),
                seconds=options.seconds,
                steps=options.steps,
                warm_up_seconds=max(0.0, options.warm_up),
                start_seconds=options.start_seconds,
                trials=options.trials,
                grid=tuple(grid),
                memory=options.memory,
                writable=tuple(options.writable),
                protect=not options.no_protection,
                as_json=options.json,
            )
        )
    except GridError as error:
        complain(str(error))
        return _USAGE_ERROR


def _add(  # noqa: PLR0917 - a row of the tables above
    group: Any, name: str, metavar: str, kind: Callable[[str], Any], default: Any, text: str
) -> None:
    shown = "" if default is None else f" (default: {default:g})"
    group.add_argument(name, metavar=metavar, type=kind, default=default, help=text + shown)


def _above(low: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above {low:g}")
        return value

    return number


def _whole(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value

    return number


def _bytes(text: str) -> int:
    factor = _UNITS.get(text[-1:].upper(), 1)
    value = int(float(text[:-1] if factor > 1 else text) * factor)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
