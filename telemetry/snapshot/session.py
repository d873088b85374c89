"""One session of torch's profiler. It is prepared, started and stopped on the training thread.

This is the only file that imports `torch.profiler`. What was measured about it (torch 2.13, and pytorch#64795):

* Stopping a session on another thread than the one that started it crashes the process. So does an exit while a
  session is on; `at_exit` registers what stops it before.
* If the first session of a process is not on the main thread, Kineto says so on stderr, whatever its log level.
* `_KinetoProfile` is used because `torch.profiler.profile` also starts an execution trace if an environment variable
  asks for one. That trace would belong to the script.
* `_KinetoProfile.prepare_trace` first imports all of Inductor, which takes 1.2 s. `Session.prepare` does the rest. In
  torch 2.4 `_KinetoProfile.start_trace` imports it.
* Before torch 2.13 (seen in 2.4 and 2.9), if Kineto is prepared and not started, every later profiler of the process
  fails: "Can't disable Kineto profiler when it's not running". So does one that starts on another thread than ours.
* Kineto writes a line to stderr at each start and stop. `snapshot.kineto_quiet` silences those of our session.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from telemetry.snapshot.budget import drop_unexpanded, on_gpu
from telemetry.snapshot.kineto_quiet import quiet
from telemetry.snapshot.snapshot_outcome import RecordedTrace
from telemetry.util.clock import NS, now_ns
from telemetry.util.files import raised

if TYPE_CHECKING:
    from collections.abc import Callable

    from telemetry.snapshot.protocol import Plan

_STARTS_BESIDE_OURS: Final = (2, 13)
"""The oldest version of torch in which this was tried."""

_PLAIN: Final = dict.fromkeys(range(32), " ") | {ord('"'): "'", ord("\\"): "/"}
"""Torch writes the names of ranges into its JSON as they are (2.13): a quotation mark made the file unreadable."""


class Session:
    """One recording of the profiler. It is prepared, started and stopped once each.

    Args:
        plan: which steps are recorded, and why.
        metadata: written into the trace; it has at least ``rank`` and ``world_size``.
        shapes: whether the shapes of the operators' inputs are recorded. Floating-point operations are counted from
            them; torch's own count (``with_flops``) is not in the file that it exports.
    """

    def __init__(self, plan: Plan, metadata: dict[str, Any], *, shapes: bool = False) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import _KinetoProfile

        activities = [ProfilerActivity.CPU]
        if on_gpu():
            activities.append(ProfilerActivity.CUDA)
        self._began_ns = now_ns()
        self._at_exit: Callable[[], None] | None = None
        self._autograd: Any = sys.modules["torch.autograd.profiler"]
        self._shapes = shapes
        self._profiler = _KinetoProfile(activities=activities, record_shapes=shapes)
        self._start_imports_inductor = not hasattr(self._profiler, "has_cudagraphs")
        self._may_be_prepared = False  # and not started
        if self._profiler._get_distributed_info() is None:  # without a process group torch does not name the rank
            ranks = {"backend": "none", "rank": metadata["rank"], "world_size": metadata["world_size"]}
            self._profiler.preset_metadata_json("distributedInfo", json.dumps(ranks))
        steps = {"reason": plan.request.reason, "first_step": plan.first_step, "last_step": plan.last_step}
        self._profiler.preset_metadata_json("telemetry", json.dumps(metadata | steps))

    def prepare(self) -> None:
        """Do the slow part of a start. It is slowest on a GPU, where tracing has to warm up."""
        inductor: Any = sys.modules.get("torch._inductor.config")
        profiler = self._profiler
        profiler.has_cudagraphs = bool(getattr(getattr(inductor, "triton", None), "cudagraphs", False))
        profiler.profiler = self._autograd.profile(
            use_cpu=True, use_device=profiler.use_device, use_kineto=True, record_shapes=self._shapes
        )
        profiler.profiler._parse_kineto_results = _parse_nothing
        self._may_be_prepared = True
        with quiet():
            profiler.profiler._prepare_trace()

    def start(self) -> None:
        """Start to record. The session must be prepared."""
        with quiet():
            self._start_trace()
        self._began_ns = now_ns()

    def _start_trace(self) -> None:
        profiler = self._profiler
        if self._start_imports_inductor and "torch._inductor.config" not in sys.modules:
            profiler.profiler._start_trace()
            distributed = profiler._get_distributed_info()
            if distributed:
                profiler.add_metadata_json("distributedInfo", json.dumps(distributed))
            for name, value in profiler.preset_metadata.items():
                profiler.add_metadata_json(name, value)
        else:
            profiler.start_trace()
        self._may_be_prepared = False

    def at_exit(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the process exits, on the main thread. `not_at_exit` cancels it."""
        atexit.register(end)
        self._at_exit = end

    def not_at_exit(self) -> None:
        """Cancel `at_exit`, because the session has ended."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None

    def stop(self) -> RecordedTrace:
        """Stop to record. Must be called on the thread that started the session."""
        with quiet():
            self._profiler.stop_trace()
        return RecordedTrace(self._profiler, (now_ns() - self._began_ns) / NS, quiet, shapes=self._shapes)

    def discard(self) -> None:
        """End the recording, and drop what was recorded: a stop would first expand it, which takes time and memory.

        Kineto's part ends with another recording, which is empty. Must be called on the thread that started this one.
        """
        drop_unexpanded()
        with quiet():
            self._start_trace()
            self._profiler.stop_trace()

    def cancel(self) -> None:
        """End a session that is prepared and not started.

        It is started first: torch writes a complaint to stderr when a session is stopped that was never started.
        """
        with quiet():
            self._start_trace()
            self._profiler.stop_trace()

    def stop_after_theirs(self) -> None:
        """Stop after a profiler of the user's has ended Kineto's session.

        Without a session in Kineto, stopping crashes the process. So another one is prepared first.
        """
        self.prepare()
        with quiet():
            self._profiler.stop_trace()

    def abort(self) -> None:
        """Stop after an error, if it records or is prepared. Raises nothing."""
        try:
            with quiet():
                if not recording() and self._may_be_prepared:
                    self._prepare_again()
                    self._start_trace()
                if recording():
                    self.discard()
        except Exception:
            pass  # nothing more can be done, and the snapshot has failed already

    def _prepare_again(self) -> None:
        """Prepare a session that may be prepared already. Without it, a start would crash the process."""
        try:
            self._profiler.profiler._prepare_trace()
        except RuntimeError as error:
            if "when it's not running" not in str(error):  # before torch 2.13 it is the sign of one that is prepared
                raise

    def begin_range(self, name: str) -> Callable[[], None]:
        """Begin a named range of the trace. Returns the function that ends it."""
        range_ = self._autograd.record_function(name.translate(_PLAIN))
        range_.__enter__()
        return lambda: range_.__exit__(None, None, None)


def _parse_nothing(_results: object) -> list[Any]:
    """Replace what makes a Python object of each event. Older versions of torch do that when a recording stops.

    Nothing reads these objects: the trace is saved without them. With them, a stop took 8 times as long (torch 2.4).
    """
    return []


def recording() -> bool:
    """Whether any profiler records on this thread."""
    autograd: Any = sys.modules.get("torch.autograd")
    return autograd is not None and bool(autograd._profiler_enabled())


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream. Nothing may synchronise during a capture."""
    return on_gpu() and bool(sys.modules["torch.cuda"].is_current_stream_capturing())


def stop_collecting() -> bool:
    """Stop a session that cannot be ended from collecting on this thread. Returns whether this torch can do that."""
    try:
        autograd: Any = sys.modules["torch.autograd"]
        autograd._toggle_collection_dynamic(False, {autograd.ProfilerActivity.CPU})
    except Exception:
        return False  # a torch that has no such switch
    return True


def stop_collecting_in_child() -> None:
    """Do the same in a child, right after the fork.

    torch writes a warning to stderr, so stderr is closed meanwhile. The child has no other thread yet that writes.
    An older torch (2.4) has no such switch. There no profiler sees what this thread of the child does.
    """
    try:
        kept = raised(os.dup(2))
    except OSError:  # stderr is closed, or no descriptor is left
        _stop_collecting_in_child()
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    _stop_collecting_in_child()
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


def _stop_collecting_in_child() -> None:
    if not stop_collecting():
        try:
            autograd: Any = sys.modules["torch.autograd"]
            autograd._enable_record_function(False)
        except Exception:
            pass  # it collects until it ends


def starts_beside_ours() -> bool:
    """Whether a profiler can start on one thread while our session is on, on another thread.

    It then ends ours in Kineto. In older versions of torch it fails instead.
    """
    torch: Any = sys.modules.get("torch")
    try:
        major, minor = str(torch.__version__).split(".")[:2]
        return (int(major), int(minor)) >= _STARTS_BESIDE_OURS
    except (AttributeError, ValueError):
        return False
