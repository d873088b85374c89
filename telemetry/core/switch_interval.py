"""Shortens the interval after which Python takes the GIL from a thread that another one waits for.

The interval is one of the process, 5 ms by default. Several parts of the agent may need a shorter one at a time.
"""

from __future__ import annotations

import os
import sys
from typing import Final

SWITCH_SECONDS: Final = 0.0005
"""The short interval."""

_users: set[str] = set()
_before: float | None = None
_registered = False


def shorten_switch_interval(user: str) -> None:
    """Shorten the interval of this process, if it is longer. ``user``: the part of the agent that needs it."""
    global _before, _registered  # noqa: PLW0603
    _users.add(user)
    now = sys.getswitchinterval()
    if now <= SWITCH_SECONDS:
        return
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_restore_in_child)
    _before = now
    sys.setswitchinterval(SWITCH_SECONDS)


def restore_switch_interval(user: str) -> None:
    """Undo `shorten_switch_interval`, unless others still need it, or other code has set another interval meanwhile."""
    global _before
    _users.discard(user)
    if _users:
        return
    before, _before = _before, None
    if before is not None and abs(sys.getswitchinterval() - SWITCH_SECONDS) < SWITCH_SECONDS / 100:
        sys.setswitchinterval(before)


def _restore_in_child() -> None:
    for user in [*_users]:
        restore_switch_interval(user)
