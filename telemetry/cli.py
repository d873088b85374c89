"""The command line: run · top · report · compare · tune · trace · snapshot · demo · doctor."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry import api, launch
from telemetry._version import __version__
from telemetry.config import GROUPS, TRIAL_VARIABLE, Config, SettingError, closest, settings
from telemetry.safety.processes import disabled
from telemetry.util.words import complain, show, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import SupportsWrite

    from telemetry.launch import Program

USAGE_ERROR: Final = 2
_JSON: Final[dict[str, Any]] = {
    "action": "store_true", "dest": "as_json", "help": "print one JSON object instead of text"
}  # fmt: skip
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(arguments: Sequence[str]) -> int | Program:
    """Do one command. Returns its exit status, or for ``run`` the program, whose code the caller runs."""
    if arguments and arguments[0].endswith(".py"):
        return _usage_error(f"{arguments[0]} is no command; did you mean: telemetry run {shlex.join(arguments)}")
    parser = _parser()
    if not arguments:
        warn(parser.format_help())
        return USAGE_ERROR
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _usage_error(_no_option(unknown[0]))
    given = vars(options)
    module, _, function = given.pop("command").rpartition(".")
    outcome: int | Program = getattr(importlib.import_module(module), function)(**given)
    return outcome


def _no_option(given: str) -> str:
    """The error text for an argument that no command accepts."""
    close = closest(given.partition("=")[0], [setting.option for setting in settings()]) if given[:1] == "-" else None
    hint = f"; did you mean {close}?" if close else ""
    return f"there is no {'option' if given[:1] == '-' else 'argument'} {given}{hint}"


class _Parser(argparse.ArgumentParser):
    """An argparse parser that prints with `util.words`, because an argument may contain unprintable text."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if file is sys.stdout:
            show(message)
        else:
            warn(message)


def _parser() -> argparse.ArgumentParser:
    """All commands. Options have the names of the keywords of the function that is named ``command``."""
    parser = _Parser(prog="telemetry", description="An always-on agent inside a PyTorch training process.")
    parser.add_argument("--version", action="version", version=f"telemetry {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_readers(commands)
    _add_tune(commands)
    _add_others(commands)
    return parser


# fmt: off
def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="run a training script, unchanged, with the agent on",
        description="Runs a script as Python would, with the agent on. Put telemetry's options before the script and "
        "the script's own after it.",
        epilog="Each option is also a keyword of telemetry.start (--host: host=...) and an environment variable "
        "(--host: TELEMETRY_HOST). TELEMETRY_DISABLED=1 turns everything off.",
    )
    _takes_script(run, command="telemetry.cli.run")
    run.add_argument("--html", metavar="FILE",
                     help="once the script has ended, rank 0 also writes the report as an HTML page")
    groups = {group: run.add_argument_group(*group) for group in GROUPS.values()}
    for setting in settings():
        text = f"{setting.help} ({setting.allowed}; default: {setting.default_text})"
        metavar = setting.name.rpartition("_")[2].upper()
        groups[setting.group].add_argument(setting.option, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _add_readers(commands: argparse._SubParsersAction[_Parser]) -> None:
    top = commands.add_parser(
        "top",
        help="watch a running job in the terminal: all ranks, worst first",
        description="Shows all ranks of a job, worst first; h lists the keys. Needs textual: "
        "pip install 'torch-telemetry[top]'.",
        epilog="Without a terminal, or with TERM=dumb, one frame is printed as text.",
    )
    top.set_defaults(command="telemetry.top.command.top")
    top.add_argument("run_dir", metavar="RUN_DIR", help="the run folder")
    top.add_argument("--once", action="store_true", help="print one frame as text, and end")

    report = commands.add_parser("report", help="show where the time of a run went, from its run folder")
    report.set_defaults(command="telemetry.report.report_command.report")
    report.add_argument("run_dir", metavar="RUN_DIR", help="the run folder")
    output = report.add_mutually_exclusive_group()
    output.add_argument("--json", **_JSON)
    output.add_argument("--html", metavar="FILE", help="write one HTML page instead, which needs no network")

    compare = commands.add_parser(
        "compare",
        help="compare two runs: which one is faster, and where the difference comes from",
        epilog="Exit status: 0 if the runs were compared; 1 if B is slower than --fail-over allows; 2 if the runs "
        "cannot be compared or the command is wrong.",
    )
    compare.set_defaults(command="telemetry.compare.compare")
    compare.add_argument("run_a", metavar="RUN_A", help="the run folder that the other one is compared with")
    compare.add_argument("run_b", metavar="RUN_B", help="the other run folder")
    compare.add_argument("--json", **_JSON)
    compare.add_argument("--fail-over", metavar="PERCENT", type=_number(0, 99.9),
                         help="end with status 1 if B is slower by more than PERCENT: the whole 95%% interval must "
                         "say so")


def _add_tune(commands: argparse._SubParsersAction[_Parser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="find better DataLoader settings with short trials of a script",
        description="Runs short trials of the unchanged script with other DataLoader settings, and prints what to "
        "change. Put telemetry's options before the script and the script's own after it.",
        epilog="A trial ends before the script does, and writes no checkpoint. What else the script writes, it writes.",
    )
    _takes_script(tune, command="telemetry.tune.tune")
    tune.add_argument("--json", **_JSON)
    length = tune.add_argument_group("length", "how long a trial takes")
    length.add_argument("--seconds", metavar="S", type=_number(0.1), default="10",
                        help="training time that is measured, without the warm-up (default: %(default)s)")
    length.add_argument("--steps", metavar="N", type=_number(1, kind=int),
                        help="a trial also ends after this many measured steps")
    length.add_argument("--warm-up", metavar="S", type=_number(0), default="3",
                        help="time after the first step that is not measured (default: %(default)s)")
    length.add_argument("--timeout", metavar="S", type=_number(1), default="600",
                        help="maximum time of a whole trial, with the start of the script (default: %(default)s)")
    search = tune.add_argument_group("settings", "which settings are tried")
    search.add_argument("--grid", metavar="NAME=V,V", action="append", default=[],
                        help="try all combinations instead of the usual settings, such as num_workers=0,2,4 "
                        "prefetch_factor=2,4; may be repeated")
    search.add_argument("--nproc-per-node", metavar="N", type=_number(1, kind=int),
                        help="start N ranks with torchrun, and tune all")
    files = tune.add_argument_group("files", "what a trial writes")
    files.add_argument("--scratch", action="store_true", help="run each trial in an empty working folder")
    files.add_argument("--no-protection", action="store_true", help="let trials write checkpoints")


def _add_others(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser(
        "trace", help="show what the steps of a torch.profiler trace consist of, and what to change"
    )
    trace.set_defaults(command="telemetry.trace.trace_command.trace")
    trace.add_argument("path", metavar="FILE_OR_DIR", help="a .json or .json.gz trace, or a folder of them")
    trace.add_argument("--json", action="store_true", dest="as_json",
                       help="print JSON instead of text: an object for a file, a list for a folder")
    trace.add_argument("--max-bytes", metavar="N", type=_size,
                       help="maximum size of a file, uncompressed (default: 2 GiB)")

    snapshot = commands.add_parser(
        "snapshot",
        help="make a running job record a torch.profiler trace of a few steps",
        description="Asks the ranks of a running job, through its run folder, to trace the same steps.",
    )
    snapshot.set_defaults(command="telemetry.snapshot.snapshot_command.snapshot")
    snapshot.add_argument("run_dir", metavar="RUN_DIR", help="the run folder of the job")
    snapshot.add_argument("--rank", metavar="all|N", type=_rank, default="all",
                          help="the ranks to record (default: %(default)s)")
    snapshot.add_argument("--steps", metavar="K", type=_number(1, 50, int), default="5",
                          help="number of steps, from 1 to 50 (default: %(default)s)")
    snapshot.add_argument("--timeout", metavar="SECONDS", type=_number(0.1), default="300",
                          help="maximum time to wait for the traces, in seconds (default: %(default)s)")

    demo = commands.add_parser(
        "demo", help="train a small network whose data loader is too slow, and show the findings (90 s)"
    )
    demo.set_defaults(command="telemetry.demo.demo_command.demo")
    demo.add_argument("--run-dir", metavar="DIR", default="demo-run",
                      help="run folder of the demo (default: %(default)s)")

    doctor = commands.add_parser("doctor", help="check what works on this machine, and what to do about the rest")
    doctor.set_defaults(command="telemetry.doctor.doctor")
    doctor.add_argument("--run-dir", metavar="DIR", help="the run folder that you want to use")


# fmt: on
def _takes_script(parser: _Parser, command: str) -> None:
    parser.usage = f"{parser.prog} [OPTIONS] SCRIPT [ARGS...]\n       {parser.prog} [OPTIONS] -m MODULE [ARGS...]"
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the dotted name of a module")
    parser.add_argument("target", metavar="SCRIPT", help="the training script")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's arguments")
    rest.required = False  # else argparse names it with what is missing
    parser.set_defaults(command=command)


def _number(low: float, high: float = math.inf, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not (low <= value <= high and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return value

    number.__name__ = "whole number" if kind is int else "number"  # for the message of argparse
    return number


def _size(text: str) -> int:
    factor = _UNITS.get(text[-1:].upper(), 1)
    return int(_number(1)(str(factor * float(text[:-1] if factor > 1 else text))))


def _rank(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: allowed is all, or the number of a rank")
    return None if text == "all" else int(text)


def run(target: str, arguments: list[str], *, module: bool, html: str | None, **settings: str) -> int | Program:
    """``telemetry run``: start the agent. Returns the program; or an exit status if there is nothing to run."""
    if html is not None and importlib.util.find_spec("bokeh") is None:
        return _usage_error("--html needs bokeh: pip install 'torch-telemetry[html]'")
    try:
        Config.load(settings) if not disabled() else None
        api.prepare(launch.folder(target, module=module))
        program = launch.find(target, module=module)
    except (SettingError, launch.LaunchError) as error:
        return _usage_error(str(error))
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    sys.argv = [program.argv0, *arguments]  # before the start: the script names a run without a name
    page = None if html is None else launch.PageAtExit(html)  # before the start: it comes after the end of the agent
    agent = api.start(**settings)
    if page is not None:
        page.agent = agent
    if TRIAL_VARIABLE in os.environ and agent.trial is None:
        complain("this trial cannot be set up, so the script was not started")
        return 1
    return program


def _usage_error(message: str) -> int:
    complain(message)
    return USAGE_ERROR
