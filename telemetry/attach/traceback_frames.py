"""Keeps our frames out of what the user sees: tracebacks, and the places that warnings name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_SKIPPED: Final = os.path.join(os.path.dirname(__file__), "importlib._bootstrap")  # noqa: PTH118, PTH120 - a text


def unseen(function: F) -> F:
    """Make a function around one of torch's or the script's invisible for ``warnings.warn(…, stacklevel=…)``.

    A warning with a stack level names the file and line of a caller, and warning filters go by these. Python skips the
    frames of its import system, which it recognises by the name of their file (bpo-24305). So the function gets such a
    name, in our folder.
    """
    code: Any = function
    code.__code__ = code.__code__.replace(co_filename=_SKIPPED)
    return function


def forget_frame(error: BaseException) -> None:
    """Drop the first frame, the caller's own, from the traceback of the exception it has just caught.

    Must be followed by a bare ``raise``. From Python 3.11 on, that restores the traceback as it is now and adds
    nothing. On 3.10 the frame stays, because a bare ``raise`` restores the traceback as it was caught.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next
