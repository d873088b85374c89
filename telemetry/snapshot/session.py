"""One session of torch's profiler, on the training thread from its beginning to its end.

The one importer of `torch.profiler`. What was measured about it (torch 2.13, and pytorch#64795):

* Stopping it on another thread than the one that started it ends the process. So does an exit with a session on:
  `at_exit` comes before.
* Where the first one of a process is not on the main thread, kineto says so on stderr, whatever its log level.
* `_KinetoProfile` and not `torch.profiler.profile`: that one also starts an execution trace where a variable asks for
  it, which would be the script's.
* Its own ``prepare_trace`` first imports the whole of Inductor: 1.2 s.
* Kineto writes a line to stderr at each start and stop, unless its log level says otherwise. It reads the level from
  the environment once in a process, with the first profiler: a variable that is set later changes nothing, and one
  that is set before silences the script's own profilers too. See `snapshot.quiet`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from telemetry.clock import NS, now_ns
from telemetry.files import raised
from telemetry.snapshot.outcome import Trace
from telemetry.snapshot.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.snapshot.plan import Plan


class Session:
    """Prepared, started and stopped, each once.

    Args:
        plan: what is to be recorded.
        about: metadata of the trace: ``rank`` and ``world_size`` at least.
    """

    def __init__(self, plan: Plan, about: dict[str, Any]) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import _KinetoProfile

        cuda: Any = sys.modules.get("torch.cuda")
        activities = [ProfilerActivity.CPU]
        if cuda is not None and cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._began_ns = now_ns()
        self._at_exit: Callable[[], None] | None = None
        self._autograd: Any = sys.modules["torch.autograd.profiler"]
        self._profiler = _KinetoProfile(activities=activities)
        if self._profiler._get_distributed_info() is None:  # what tells the ranks' traces apart, without process groups
            ranks = {"backend": "none", "rank": about["rank"], "world_size": about["world_size"]}
            self._profiler.preset_metadata_json("distributedInfo", json.dumps(ranks))
        steps = {"reason": plan.request.reason, "first_step": plan.first_step, "last_step": plan.last_step}
        self._profiler.preset_metadata_json("telemetry", json.dumps(about | steps))

    def prepare(self) -> None:
        """What is slow about a start, above all on a GPU."""
        inductor: Any = sys.modules.get("torch._inductor.config")
        profiler = self._profiler
        profiler.has_cudagraphs = bool(getattr(getattr(inductor, "triton", None), "cudagraphs", False))
        profiler.profiler = self._autograd.profile(use_cpu=True, use_device=profiler.use_device, use_kineto=True)
        with quiet():
            profiler.profiler._prepare_trace()

    def start(self) -> None:
        """From here on everything is recorded."""
        with quiet():
            self._profiler.start_trace()
        self._began_ns = now_ns()

    def at_exit(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the interpreter exits, on the main thread, unless the session is over by then."""
        atexit.register(end)
        self._at_exit = end

    def over(self) -> None:
        """The session is over: there is nothing left to end."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None

    def stop(self) -> Trace:
        """End it: on the thread that began it, and on no other."""
        with quiet():
            self._profiler.stop_trace()
        return Trace(self._profiler, (now_ns() - self._began_ns) / NS, quiet)

    def cancel(self) -> None:
        """End what is only prepared: begun first, for torch complains on stderr if it is ended as it is."""
        with quiet():
            self._profiler.start_trace()
            self._profiler.stop_trace()

    def stop_after_theirs(self) -> None:
        """End it after another session has ended kineto's. Kineto must have one, or this would end the process."""
        self.prepare()
        with quiet():
            self._profiler.stop_trace()

    def give_up(self) -> None:
        """After something failed: end it if it records."""
        if recording():
            try:
                with quiet():
                    self._profiler.stop_trace()
            except Exception:
                pass  # nothing more can be done; the plan has failed and says why

    def begin_range(self, name: str) -> Callable[[], None]:
        """Begin a range of the trace. Returns what ends it."""
        range_ = self._autograd.record_function(name)
        range_.__enter__()
        return lambda: range_.__exit__(None, None, None)


def recording() -> bool:
    """Whether a profiler records on this thread."""
    autograd: Any = sys.modules.get("torch.autograd")
    return autograd is not None and bool(autograd._profiler_enabled())


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream: nothing that synchronises may come now."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())


def gather_no_more() -> None:
    """A session that cannot be ended: let it at least gather nothing more on this thread, where torch can do that."""
    try:
        autograd: Any = sys.modules["torch.autograd"]
        autograd._toggle_collection_dynamic(False, {autograd.ProfilerActivity.CPU})
    except Exception:
        pass  # a torch that has no such switch


def gather_no_more_in_child() -> None:
    """The same right after a fork. Torch warns of it on stderr; there is no other thread yet whose words got lost."""
    try:
        kept = raised(os.dup(2))
    except OSError:  # no stderr, or no descriptor left for it
        gather_no_more()
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    gather_no_more()
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)
