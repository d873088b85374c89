"""The command line: run · report · trace · snapshot · demo · doctor."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Final

from telemetry import api, launch
from telemetry._version import __version__
from telemetry.config import Config, SettingError, disabled
from telemetry.terminal import complain, show, show_json, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import SupportsWrite

USAGE_ERROR: Final = 2


def main(arguments: Sequence[str]) -> int:
    """Run one command. Returns the exit status; a script under ``run`` may leave by its own ``sys.exit``."""
    options = _parser().parse_args(arguments)
    command: int = options.command(options)
    return command


class _Parser(argparse.ArgumentParser):
    """Prints as every command does: an argument may be any text."""

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if file is sys.stdout:
            show(message)
        else:
            warn(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="telemetry", description="An always-on agent inside a PyTorch training process.")
    parser.add_argument("--version", action="version", version=f"telemetry {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="run a training script, unchanged, with the agent on",
        usage="telemetry run [OPTIONS] SCRIPT [ARGS...]\n       telemetry run [OPTIONS] -m MODULE [ARGS...]",
        description="Runs a script as Python would. Options of ours stand before the script, its own after it.",
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's dotted name")
    settings = run.add_argument_group("settings", "each also as the variable TELEMETRY_<NAME>")
    for spec in dataclasses.fields(Config):
        option = "--" + spec.name.replace("_", "-")
        settings.add_argument(option, dest=f"setting_{spec.name}", metavar="VALUE", help=_help_of(spec))
    run.add_argument("target", metavar="SCRIPT", help="the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="where the time of a run went, from its run folder")
    report.add_argument("run_dir", metavar="RUN_DIR")
    report.add_argument("--json", action="store_true", help="as one JSON object, for programs")
    report.set_defaults(command=_report)

    trace = commands.add_parser(
        "trace", help="what the steps in a trace of torch.profiler are made of, and what to change"
    )
    trace.add_argument("path", metavar="FILE_OR_DIR", help="a .json or .json.gz trace, or a folder of them")
    trace.add_argument("--json", action="store_true", help="an object for a file, a list for a folder; for programs")
    trace.add_argument(
        "--max-bytes", metavar="N", type=_bytes, default=None, help="of a file, uncompressed (default: 4 GiB)"
    )
    trace.set_defaults(command=_trace)

    snapshot = commands.add_parser(
        "snapshot",
        help="have a running job record a torch.profiler trace of a few steps",
        description="Asks the ranks of a running job, through its run folder, for a trace of the same steps on all.",
    )
    snapshot.add_argument("run_dir", metavar="RUN_DIR")
    snapshot.add_argument("--rank", metavar="all|N", default="all", help="the ranks to record (default: %(default)s)")
    snapshot.add_argument("--steps", metavar="K", default="5", help="how many, 1 to 50 (default: %(default)s)")
    snapshot.add_argument(
        "--timeout", metavar="SECONDS", default="300", help="how long to wait for the traces (default: %(default)s)"
    )
    snapshot.set_defaults(command=_snapshot)

    demo = commands.add_parser("demo", help="train a small network that starves, and show what is seen (90 s)")
    demo.add_argument("--run-dir", metavar="DIR", default="demo-run", help="default: %(default)s")
    demo.set_defaults(command=_demo)

    doctor = commands.add_parser("doctor", help="what would work on this machine, and why not")
    doctor.add_argument("--run-dir", metavar="DIR", default=None, help="the run folder you mean to use")
    doctor.set_defaults(command=_doctor)
    return parser


def _help_of(spec: dataclasses.Field[object]) -> str:
    default = spec.default
    shown = "auto" if spec.name == "stuck_seconds" else default
    text = str(spec.metadata["help"]).replace("%", "%%")
    hide = default is None and spec.name != "stuck_seconds" or isinstance(default, tuple)  # noqa: RUF021
    return text if hide else f"{text} (default: {shown})"


def _run(options: argparse.Namespace) -> int:
    settings = {
        name.removeprefix("setting_"): value
        for name, value in vars(options).items()
        if name.startswith("setting_") and value is not None
    }
    try:
        Config.load(settings) if not disabled() else None
        program = launch.find(options.target, module=options.module)
    except (SettingError, launch.LaunchError) as error:
        return _usage_error(str(error))
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    sys.argv = [
        program.argv0,
        *options.arguments,
    ]  # before the start: a run without a name is named by its script
    api.start(**settings)
    launch.run(program, options.arguments)
    return 0


def _report(options: argparse.Namespace) -> int:
    from telemetry.report import command

    return command.report(options.run_dir, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    from telemetry.snapshot.reading import command, limits

    caps = limits.Limits() if options.max_bytes is None else limits.Limits(max_bytes=options.max_bytes)
    outcome = command.trace(options.path, as_json=options.json, limits=caps)
    for problem in outcome.problems:
        complain(problem)
    written = show_json(outcome.text) if options.json else show(outcome.text)
    return outcome.status or written


def _bytes(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _snapshot(options: argparse.Namespace) -> int:
    from telemetry.snapshot import command

    try:
        wanted = command.Wanted.parse(options.rank, options.steps, options.timeout)
    except ValueError as error:
        return _usage_error(str(error))
    return command.snapshot(options.run_dir, wanted, lambda line: show(f"{line}\n"))


def _demo(options: argparse.Namespace) -> int:
    from telemetry.demo import command

    return command.demo(options.run_dir)


def _doctor(options: argparse.Namespace) -> int:
    from telemetry.doctor import command

    return command.doctor(options.run_dir)


def _usage_error(message: str) -> int:
    complain(message)
    return USAGE_ERROR
