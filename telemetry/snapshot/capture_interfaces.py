"""What a capture needs of the training thread's hooks and of the profiler watch. `attach` has both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Profilers(Protocol):
    """The profilers of this process: the user's own ("theirs") and the capture's ("ours")."""

    def theirs(self) -> str | None:
        """Why ours must not start on the calling thread; None if it may."""

    def ours(self) -> AbstractContextManager[None]:
        """The context in which ours is started and stopped."""

    def at_work(self) -> bool:
        """Whether a profiler of the user's is on, on any thread."""


class Hooks(Protocol):
    """The training thread's hooks, as far as a capture uses them."""

    recorder: Any
    profiler_ranges: Any
    fast_path: Any
