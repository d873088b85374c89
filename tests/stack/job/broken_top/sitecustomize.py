"""Makes `telemetry top` fail in its loop, after the screen has been shown."""

import sys

if "top" in sys.argv or "top" in getattr(sys, "orig_argv", ()):
    from telemetry.top import screen

    made = screen.Frame.lines
    frames = []

    def lines(*args, **kwargs):
        frames.append(1)
        if len(frames) > 5:
            raise RuntimeError("broken on purpose")
        return made(*args, **kwargs)

    screen.Frame.lines = lines
