"""The public API: `start`, `stop`, `watch`, `step`, `phase`, `tokens`, `metrics`, `resumed`, `request_snapshot`.

While no agent runs, every call is allowed and does nothing. So a script can keep its calls with
``TELEMETRY_DISABLED=1``.
"""

from __future__ import annotations

import numbers
import operator
import os
import sys
import threading
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from telemetry.safety import imports
from telemetry.safety.errors import let_pass, say
from telemetry.safety.processes import disabled, is_loader_worker, runs_without_gil
from telemetry.seams.patching import WeakMap
from telemetry.util.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from telemetry.agent.agent import Agent
    from telemetry.seams.tracker import StepTracker

T = TypeVar("T")

_agent: Agent | None = None
_agent_class: Any = None  # these two are imported by `load`
_config: Any = None
_agents: WeakMap[None] = WeakMap()  # stopped ones too: a hook may have to outlive its agent
_starting = threading.Lock()


class InactiveAgent:
    """What `start` returns if no agent runs: with TELEMETRY_DISABLED, in a DataLoader worker, or after a failure."""

    running = False
    run_dir = None
    identity = None
    metrics_url = None
    trial = None

    def stop(self) -> None:
        """Do nothing."""


def start(run_dir: str | os.PathLike[str] | None = None, **settings: Any) -> Agent | InactiveAgent:
    """Start the agent of this process. A second call returns the running agent.

    The calling thread is assumed to be the training thread. If the first optimizer step happens on another thread, the
    agent observes that thread instead.

    Args:
        run_dir: folder for this run's logs; ``telemetry-runs/RUN`` by default.
        settings: see `Config`; each can also be set as ``TELEMETRY_<NAME>``.

    Returns:
        The running agent; an `InactiveAgent` if telemetry is disabled, in a DataLoader worker, or if the agent cannot
        start, as in a Python without its GIL. A failed start is reported on stderr and does not stop the script.

    Raises:
        SettingError: a setting has a value that is not allowed. Nothing was started.
    """
    global _agent  # noqa: PLW0603 - one agent a process is the contract
    if disabled() or is_loader_worker():
        return InactiveAgent()
    if runs_without_gil():  # nothing of ours is loaded yet: a package might turn the GIL on for the whole training
        why = "Python's GIL is off, and the agent relies on it (PYTHON_GIL=1 turns it on)"
        say(f"telemetry: cannot start: {why}; the run goes on without it")
        return InactiveAgent()
    with _starting:
        if _agent is not None and _agent.running:
            return _agent
        if run_dir is not None:
            settings["run_dir"] = run_dir
        try:
            if _config is None:
                load(*sys.path[:1], os.curdir)
        except Exception as error:
            return _not_started(error)
        config = _config.Config.load(settings)
        try:
            agent: Agent = _agent_class(config)
            _agent = agent  # set before it starts: a child may be forked at any moment
            _agents[agent] = None
            for variable, close in _config.unknown_variables().items():
                hint = f"; did you mean {close}?" if close else ""
                agent.errors.tell("config", f"{variable} is no setting of ours and was ignored{hint}")
            agent.start()
        except Exception as error:
            stop()
            return _not_started(error)
        return agent


def _not_started(error: Exception) -> InactiveAgent:
    let_pass(error)
    say(f"telemetry: cannot start ({type(error).__name__}: {error}); the run goes on without it")
    return InactiveAgent()


def load(*project: str) -> None:
    """Import all that an agent can ever need, whatever modules the project has in these folders. See `imports`.

    Raises:
        ImportError: a package is missing.
    """
    global _agent_class, _config
    imports.begin(*project)
    try:
        from telemetry import config
        from telemetry.agent.agent import Agent
        from telemetry.seams import watch  # noqa: F401
    finally:
        imports.end()
    _agent_class, _config = Agent, config


def prepare(*project: str) -> None:
    """`load`, if an agent may run in this process, for ``telemetry run``. If it fails, `start` says why."""
    if not disabled() and not runs_without_gil():
        with suppress(Exception):
            load(*project)


def stop() -> None:
    """Stop the agent: undo every patch, finish the log, end the threads and close the sockets. No-op if none runs."""
    global _agent
    agent, _agent = _agent, None
    if agent is not None:
        agent.stop()


def leaving(error: SystemExit) -> None:
    """Note that the script ends with ``sys.exit``. For ``telemetry run``."""
    _contained(_running(), lambda agent: agent.attempt.end.leaving(error.code, error))


def watch(iterable: Iterable[T]) -> Iterable[T]:
    """Time an iterable as a data source: each ``next`` counts as a wait, each item as a step.

    The returned wrapper behaves like the iterable and passes its ``isinstance`` checks. Pickling it pickles the
    iterable. The argument itself is returned if it is a DataLoader or its iterator (the agent times those anyway), if
    it is watched already, if it is None, and while no agent runs.

    Raises:
        TypeError: the argument cannot be iterated.
    """
    agent = _running()
    if agent is None or iterable is None or _is_timed_already(agent, iterable):
        return iterable
    kind = type(iterable)  # Python looks up these methods on the type, too; the object itself may raise anything
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(f"telemetry.watch needs something to iterate over, not {kind.__name__}")
    from telemetry.seams.watch import wrap

    try:
        watched: Iterable[T] = wrap(iterable, _tracker)
    except Exception as error:  # a class that cannot be wrapped: its waits are not measured
        agent.tracker.fault(error)
        return iterable
    return watched


def resumed(*, step: int) -> None:
    """Set the optimizer step at which the training resumes. Call it when the checkpoint has been loaded.

    It is not needed for Adam and other optimizers that count their steps: the agent reads the step from their loaded
    state. Without either, the report assumes the newest complete checkpoint.

    Args:
        step: number of optimizer steps that the loaded state contains; numpy's whole numbers will do.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative.
    """
    number = _whole("step is", _index(step))
    _contained(_running(), lambda agent: agent.tracker.resume.told(agent.tracker, number))


def metrics() -> dict[str, float]:
    """The newest figures of this rank, for any logger. Cheap: it copies a dictionary, and touches no device.

    Returns:
        The figures by name, with units in the names (docs/integrations.md has all of them); ratios are 0..1. They are
        some seconds old; rates and percentiles are over the newest window of the log. Figures that were not measured
        are absent. Empty while no agent runs, and in a DataLoader worker.
    """
    return _contained(_running(), lambda agent: dict(agent.figures.newest)) or {}


def tokens(number: int, /) -> None:
    """Count so many tokens for the current step of this rank. In an evaluation or a checkpoint it counts nothing.

    Args:
        number: tokens; numpy's whole numbers will do. A tensor will not: reading it could wait for the GPU.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative.
    """
    count = _whole("tokens are", number)
    _contained(_running(), lambda agent: agent.tracker.tell_tokens(count))


def request_snapshot(*, steps: int | None = None, rank: int | None = None) -> bool:
    """Request a trace of a few steps on all ranks. Returns immediately.

    The ranks first agree on the steps. Requests of several ranks at the same time give one snapshot. The event
    ``snapshot`` in the log contains the result.

    Args:
        steps: number of steps, from 1 to 50; the setting ``snapshot_steps`` by default.
        rank: the only rank to record; all by default.

    Returns:
        Whether the request was accepted. False while no agent runs, or if ``max_snapshots`` is 0.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: an argument is out of its range.
    """
    steps = None if steps is None else _whole("steps of a snapshot are", steps, 1, 50)
    rank = None if rank is None else _whole("rank of a snapshot is", rank, 0, 1 << 24)
    return bool(_contained(_running(), lambda agent: agent.snapshots.request(rank, steps)))


def _whole(what: str, value: object, low: int = 0, high: int = 1 << 62) -> int:
    """A checked whole number. A tensor is refused without reading it, which could wait for the GPU."""
    kind: Any = type(value)
    if not issubclass(kind, numbers.Integral) or kind is bool:
        raise TypeError(f"{what} a whole number, not {kind.__name__}")
    number: int = int(value)  # type: ignore[call-overload]
    if not low <= number <= high:
        raise ValueError(f"{what} from {low} to {high}, not {number}")
    return number


def _index(value: Any) -> Any:
    """The whole number that a value stands for: a checkpoint may have the step as a tensor. Others are unchanged."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


class step(AbstractContextManager[None]):  # noqa: N801 - reads as the statement it is
    """``with telemetry.step():`` marks one training step.

    From the first use on, only these blocks start and end steps. A batch that was requested since the previous block
    belongs to this step.
    """

    def __enter__(self) -> None:
        self._agent = _running()
        _contained(self._agent, lambda agent: agent.tracker.enter_step())

    def __exit__(self, *_: object) -> None:
        _contained(self._agent, lambda agent: agent.tracker.exit_step())


class phase(AbstractContextManager[None]):  # noqa: N801 - reads as the statement it is
    """``with telemetry.phase("evaluation"):`` marks a part of the run that is not training.

    Args:
        name: ``"evaluation"`` and ``"checkpoint"`` have their own categories in the ledger. The time of any other
            phase counts as ``other``, except for training steps inside it. The log contains the name, cut to 200
            characters.

    Raises:
        TypeError: the name is no text.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a phase is a text, not {type(name).__name__}")
        self._name = name[:200]

    def __enter__(self) -> None:
        self._agent = _running()
        self._start = now_ns()
        self._before = _contained(self._agent, lambda agent: agent.tracker.enter_phase(self._name))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and self._name == "checkpoint"
        _contained(self._agent, lambda agent: self._end(agent.tracker, failed=failed))

    def _end(self, tracker: StepTracker, *, failed: bool) -> None:
        if failed and self._before is not None:
            tracker.resume.failed()
        tracker.exit_phase(self._name, self._before, self._start)


def _contained(agent: Agent | None, call: Callable[[Agent], T]) -> T | None:
    """Call a part of the agent, if there is one. A failure of ours is counted and does not reach the script."""
    if agent is None:
        return None
    try:
        return call(agent)
    except Exception as error:
        agent.tracker.fault(error)
        return None


def _running() -> Agent | None:
    agent = _agent
    return agent if agent is not None and agent.running else None


def _tracker() -> StepTracker | None:
    agent = _running()
    return None if agent is None else agent.tracker


def _is_timed_already(agent: Agent, iterable: object) -> bool:
    from telemetry.seams import loaders
    from telemetry.seams.watch import Watched

    if issubclass(type(iterable), Watched):
        return True
    if not agent.config.patch:
        return False
    if loaders.is_loader(iterable):  # of a class that iterates in its own way, maybe on another thread
        return agent.attachment.watch_class(type(iterable))
    return loaders.is_loader_iterator(iterable)


def _after_fork_in_child() -> None:
    """Make the agent inactive in a forked child: no hook, thread, socket or log line. The child may start its own."""
    global _agent, _starting  # noqa: PLW0603
    _agent = None
    _starting = threading.Lock()  # the parent's may have been held
    for agent in _agents.objects():
        try:
            agent.after_fork_in_child()
        except Exception:
            pass  # Python would print it


os.register_at_fork(after_in_child=_after_fork_in_child)
