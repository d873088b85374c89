"""What is known of functions of libraries that take long in many scripts: what to do instead, where that is known."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from telemetry.util.stacks import Spot, Stack


class Habit(NamedTuple):
    """A way to use a library that takes long.

    Attributes:
        frame: matches ``module:function`` of a frame of the library. The frame may be anywhere below the user's line.
        named: what the line calls, in a person's words. Empty: it is named as any function.
        do: what to do instead.
        removes: whether hardly any of the time is left then.
    """

    frame: re.Pattern[str]
    named: str
    do: str
    removes: bool = True


def _habit(frame: str, named: str, do: str, *, removes: bool = True) -> Habit:
    return Habit(re.compile(frame), named, do, removes)


_OPEN_ONCE: Final = "open it once (in each worker) and keep it open, not once for each item"

HABITS: Final = (
    _habit(
        r"pandas\.core\.(indexing:|(series|frame):(__getitem__|iterrows|itertuples))",
        "pandas indexing",
        'take the columns out as arrays once (frame["column"].to_numpy()), and index those: pandas makes objects for '
        "each row",
    ),
    _habit(
        r"zipfile(\.\w+)?:(__init__|_RealGetContents)$", "ZipFile", f"{_OPEN_ONCE}: each time its directory is read"
    ),
    _habit(r"tarfile:(\w*open|__init__|next|getmembers?|_load)$", "tarfile", f"{_OPEN_ONCE}: its members are read"),
    _habit(r"h5py\._hl\.files:", "h5py.File", _OPEN_ONCE),
    _habit(r"(zarr|rasterio|xarray)\b.*:open\w*$", "", _OPEN_ONCE),
    _habit(
        r"random:(sample|choices?)$",
        "",
        "draw from a list or an array: in a deque each access walks through it; or draw indices with NumPy",
    ),
    _habit(
        r"(json\.decoder:(raw_)?decode|csv:__next__)$",
        "",
        "parse the files once, before the training, and keep arrays (.npy, Parquet)",
    ),
    _habit(r"copy:deepcopy$", "", "copy only what changes"),
    _habit(r"transformers\.tokenization_\w+:", "", "tokenise once, before the training, and keep the ids"),
    _habit(r"librosa\.core\.audio:(load|resample)$", "", "resample once, before the training, and keep the result"),
    _habit(
        r"PIL\.(Image|ImageFile|\w+ImagePlugin):(resize|load|convert|thumbnail)$",
        "",
        "decode no larger than needed (Image.draft for JPEG), or store images of the size that is used",
        removes=False,
    ),
    _habit(
        r"(torch\.utils\.tensorboard|tensorboardX|wandb|mlflow|logging|tqdm)\b|torch\._tensor_str:",
        "",
        "do it less often, such as every 100 steps",
    ),
)
"""The ways that are known. The first that matches counts."""


@lru_cache(maxsize=4096)
def _of_frame(spot: Spot) -> Habit | None:
    named = f"{spot.module}:{spot.function}"
    return next((habit for habit in HABITS if habit.frame.match(named)), None)


def habit_in(callees: Stack) -> Habit | None:
    """The habit in the frames below a line of the user's, the outermost first; None if none is known."""
    return next((habit for spot in reversed(callees) if (habit := _of_frame(spot)) is not None), None)
