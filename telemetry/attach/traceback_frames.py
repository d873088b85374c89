"""Removes our frames from the user's tracebacks."""

from __future__ import annotations


def forget_frame(error: BaseException) -> None:
    """Drop the first frame, the caller's own, from the traceback of the exception it has just caught.

    Must be followed by a bare ``raise``. From Python 3.11 on, that restores the traceback as it is now and adds
    nothing. On 3.10 the frame stays, because a bare ``raise`` restores the traceback as it was caught.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next
