"""The public face: `start`, `stop`, `watch`, `step`, `phase`.

All of it works, and does nothing, while no agent runs: a script may keep its calls with ``TELEMETRY_DISABLED=1``.
"""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
import sys
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from telemetry import config as settings_module
from telemetry.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from telemetry.agent import Agent
    from telemetry.attach.steps import StepTracker

T = TypeVar("T")

_agent: Agent | None = None
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()  # stopped ones too: a hook may have to outlive its agent
_starting = threading.Lock()
_fork_handler_registered = False


class InactiveAgent:
    """What `start` returns where nothing is to run: TELEMETRY_DISABLED, or a DataLoader worker."""

    running = False
    run_dir = None
    identity = None
    metrics_url = None

    def stop(self) -> None:
        """Nothing to stop."""


def start(run_dir: str | os.PathLike[str] | None = None, **settings: Any) -> Agent | InactiveAgent:
    """Start the agent of this process. A second call returns the one that runs.

    The calling thread is taken to be the one that trains; should the first optimizer step happen on another, that
    one is followed.

    Args:
        run_dir: folder for this run's logs; ``telemetry-runs/RUN`` by default.
        settings: see `Config`; each can also be set as ``TELEMETRY_<NAME>``.

    Raises:
        SettingError: a setting has a value that is not allowed. Nothing was started.
    """
    global _agent  # noqa: PLW0603 - one agent a process is the contract
    if settings_module.disabled() or _in_worker():
        return InactiveAgent()
    _register_fork_handler()
    with _starting:
        if _agent is not None and _agent.running:
            return _agent
        if run_dir is not None:
            settings["run_dir"] = run_dir
        config = settings_module.Config.load(settings)
        try:
            from telemetry.agent import Agent

            importlib.import_module("telemetry.attach.watched")  # now: later there may be no descriptor to load it with
            agent = _agent = Agent(config)  # known before it starts: a child may be forked at any moment
            _agents.add(agent)
            for variable, close in settings_module.unknown_variables().items():
                hint = f"; did you mean {close}?" if close else ""
                agent.faults.tell("config", f"{variable} is no setting of ours and was ignored{hint}")
            agent.start()
        except Exception as error:
            stop()
            if config.start_line:
                from telemetry.stderr import say

                say(f"telemetry: cannot start ({type(error).__name__}: {error}); the run goes on without it")
            return InactiveAgent()
        return agent


def stop() -> None:
    """Stop the agent: every patch is undone, the log ended, threads and sockets are gone. Harmless when none runs."""
    global _agent
    agent, _agent = _agent, None
    if agent is not None:
        agent.stop()
        from telemetry import forks

        forks.after()


def watch(iterable: Iterable[T]) -> Iterable[T]:
    """Time an iterable as a data source: each ``next`` is a wait, each item a step.

    What is returned behaves like the object, and ``isinstance`` takes it for one; pickled, it is the object. A
    DataLoader or its iterator needs none of it and is returned as it is; so are what is watched already, None, and
    everything while no agent runs.

    Raises:
        TypeError: the argument cannot be iterated.
    """
    agent = _running()
    if agent is None or iterable is None or _is_timed_already(agent, iterable):
        return iterable
    kind = type(iterable)  # where Python looks, too; the object itself may raise anything
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(f"telemetry.watch needs something to iterate over, not {kind.__name__}")
    from telemetry.attach.watched import wrap  # loaded since `start`

    try:
        watched: Iterable[T] = wrap(iterable, _tracker)
    except Exception as error:  # a class that nothing can be learned from: its waits are not seen
        agent.tracker.fault(error)
        return iterable
    return watched


def request_snapshot(*, steps: int | None = None, rank: int | None = None) -> bool:
    """Ask for a trace of a few steps, of all ranks, as soon as they have agreed on which. Returns at once.

    Several ranks that ask at the same time get one together. The log says what came of it (event ``snapshot``).

    Args:
        steps: how many, from 1 to 50; the setting ``snapshot_steps`` by default.
        rank: the one rank to record; all by default.

    Returns:
        Whether it will be put before the ranks: not while no agent runs, nor where ``max_snapshots`` is 0.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: an argument is out of its range.
    """
    for name, value, low, high in (("steps", steps, 1, 50), ("rank", rank, 0, 1 << 24)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} of a snapshot is a whole number, not {type(value).__name__}")
        if not low <= value <= high:
            raise ValueError(f"{name} of a snapshot is from {low} to {high}, not {value}")
    agent = _running()
    return agent is not None and agent.snapshots.request(rank, steps)


class step(AbstractContextManager[None]):  # noqa: N801 - reads as the statement it is
    """``with telemetry.step():`` one training step, said by the user.

    From the first one on, only these open and close steps. A batch requested since the last one belongs to it.
    """

    def __enter__(self) -> None:
        agent = self._agent = _running()
        if agent is not None:
            try:
                agent.tracker.enter_step()
            except Exception as error:
                agent.tracker.fault(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        agent = self._agent
        if agent is not None:
            try:
                agent.tracker.exit_step()
            except Exception as ours:
                agent.tracker.fault(ours)


class phase(AbstractContextManager[None]):  # noqa: N801 - reads as the statement it is
    """``with telemetry.phase("evaluation"):`` a part of the run that is not training.

    Args:
        name: ``"evaluation"`` and ``"checkpoint"`` have categories of their own in the ledger; the time of any other
            phase, unless training goes on inside it, is ``other``. The name stands in the log.

    Raises:
        TypeError: the name is no text.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a phase is a text, not {type(name).__name__}")
        self._name = name[:200]

    def __enter__(self) -> None:
        agent = self._agent = _running()
        self._start, self._before = now_ns(), None
        if agent is not None:
            try:
                self._before = agent.tracker.enter_phase(self._name)
            except Exception as error:
                agent.tracker.fault(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        agent = self._agent
        if agent is not None:
            try:
                agent.tracker.exit_phase(self._name, self._before, self._start)
            except Exception as ours:
                agent.tracker.fault(ours)


def _running() -> Agent | None:
    agent = _agent
    return agent if agent is not None and agent.running else None


def _tracker() -> StepTracker | None:
    """That of the agent that runs."""
    agent = _running()
    return None if agent is None else agent.tracker


def _is_timed_already(agent: Agent, iterable: object) -> bool:
    from telemetry.attach import kinds
    from telemetry.attach.watched import Watched

    if issubclass(type(iterable), Watched):
        return True
    if not agent.config.patch:
        return False
    if kinds.is_loader(iterable):  # of a class that iterates in its own way, maybe on another thread
        return agent.attachment.watch_class(type(iterable))
    return kinds.is_loader_iterator(iterable)


def _in_worker() -> bool:
    """Whether this process is no training process: a DataLoader worker, or a spawned child importing its main module.

    A spawned child runs the script's top level once more, where an unguarded ``telemetry.start()`` may stand. What
    torch says of workers is not enough: where they are threads, it says that the training process is one.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        return True
    worker = sys.modules.get("torch.utils.data._utils.worker")
    if worker is None or worker.get_worker_info() is None:
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":
            return True
        frame = frame.f_back
    return False


def _register_fork_handler() -> None:
    global _fork_handler_registered  # noqa: PLW0603
    if not _fork_handler_registered:
        from telemetry import forks

        os.register_at_fork(after_in_child=_after_fork_in_child)
        if forks.WARNS:
            os.register_at_fork(before=forks.before, after_in_parent=forks.after_in_parent, after_in_child=forks.after)
        _fork_handler_registered = True


def _after_fork_in_child() -> None:
    """A forked child is inert: no hook, no thread, no socket, no line of ours. It may start an agent of its own."""
    global _agent, _starting  # noqa: PLW0603
    _agent = None
    _starting = threading.Lock()  # the parent's may have been held
    for agent in list(_agents):
        try:
            agent.after_fork_in_child()
        except Exception:
            pass  # Python would print it
