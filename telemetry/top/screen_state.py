"""What a person has chosen on the screen, and what each key does to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from telemetry.top.rank_order import SORTS, WORST, arranged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from telemetry.top.rank_row import RankRow

LIST: Final = "list"
RANK: Final = "rank"
HELP: Final = "help"
TYPING: Final = "typing"
CONFIRM: Final = "confirm"

Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class ScreenState:
    """The state of the screen.

    Attributes:
        page: `LIST`, `RANK` (one is open), or `HELP`.
        mode: `TYPING` a text to filter by, `CONFIRM` (a snapshot), or empty.
        sort: from `SORTS`. ``trouble_only``, ``text``: see `arranged`.
        selected: the rank under the cursor; None: the first row, whichever that is.
        whole_run: whether the bars are of the whole run.
        scrolled: lines by which an open rank is scrolled.
        message: a line for the person, until the next key.
    """

    page: str = LIST
    mode: str = ""
    sort: str = WORST
    trouble_only: bool = False
    text: str = ""
    selected: Key | None = None
    whole_run: bool = False
    scrolled: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pressed:
    """What a key leads to: the new state, whether to end, and the rank to take a snapshot of (or ``all``)."""

    state: ScreenState
    quit: bool = False
    snapshot: str | None = None


def shown_rows(state: ScreenState, rows: Sequence[RankRow]) -> list[RankRow]:
    """The rows of the list."""
    return arranged(rows, state.sort, trouble_only=state.trouble_only, text=state.text)


def cursor(state: ScreenState, shown: Sequence[RankRow]) -> int:
    """The place of the cursor in the list."""
    return next((place for place, row in enumerate(shown) if row.key == state.selected), 0)


def press(  # noqa: PLR0911, one return for each kind of key
    state: ScreenState, key: str, shown: Sequence[RankRow], *, page_rows: int, no_snapshot: str = ""
) -> Pressed:
    """What a key does.

    Args:
        state: before it.
        key: a character, or a name of `terminal_keys`.
        shown: the rows of the list.
        page_rows: how many rows the screen has.
        no_snapshot: why no snapshot can be requested; empty if it can.
    """
    state = replace(state, message="")
    if state.mode == TYPING:
        return Pressed(_typed(state, key))
    if state.mode == CONFIRM:
        return _confirmed(replace(state, mode=""), key)
    if state.page != LIST and key in {"q", "escape", "left", "backspace", "enter", "h", "?"}:
        return Pressed(replace(state, page=LIST, scrolled=0))
    if key == "q":
        return Pressed(state, quit=True)
    if key == "n":
        if no_snapshot:
            return Pressed(replace(state, message=no_snapshot))
        if not shown:
            return Pressed(replace(state, message="there is no rank to take a snapshot of"))
        # The rank that is asked about stays the one, even if the order changes before the answer.
        return Pressed(replace(state, mode=CONFIRM, selected=shown[cursor(state, shown)].key))
    if key in _MOVES:
        return Pressed(_moved(state, _MOVES[key], shown, page_rows))
    if key == "escape":
        return Pressed(replace(state, trouble_only=False, text="", selected=None))
    return Pressed(_chosen(state, key, shown))


def _chosen(  # noqa: PLR0911, the same
    state: ScreenState, key: str, shown: Sequence[RankRow]
) -> ScreenState:
    if key in {"s", "S"}:
        names = list(SORTS)
        step = 1 if key == "s" else -1
        return replace(state, sort=names[(names.index(state.sort) + step) % len(names)], selected=None)
    if key == "f":
        return replace(state, trouble_only=not state.trouble_only, selected=None)
    if key == "/":
        return replace(state, mode=TYPING, page=LIST, selected=None)
    if key == "t":
        return replace(state, whole_run=not state.whole_run)
    if key in {"enter", "right"} and shown:
        return replace(state, page=RANK, selected=shown[cursor(state, shown)].key)
    if key in {"h", "?"}:
        return replace(state, page=HELP)
    return state


_MOVES: Final = {
    "up": "-1", "k": "-1", "down": "1", "j": "1", "page up": "-p", "page down": "p", " ": "p", "home": "first",
    "g": "first", "end": "last", "G": "last",
}  # fmt: skip


def _moved(state: ScreenState, move: str, shown: Sequence[RankRow], page_rows: int) -> ScreenState:
    steps = {"-1": -1, "1": 1, "-p": -page_rows, "p": page_rows, "first": -1 << 30, "last": 1 << 30}[move]
    if state.page == RANK:
        return replace(state, scrolled=max(0, state.scrolled + steps) if move != "last" else state.scrolled)
    if state.page != LIST or not shown:
        return state
    place = min(max(0, cursor(state, shown) + steps), len(shown) - 1)
    return replace(state, selected=None if place == 0 else shown[place].key)


def _typed(state: ScreenState, key: str) -> ScreenState:
    if key == "enter":
        return replace(state, mode="")
    if key == "escape":
        return replace(state, mode="", text="")
    if key == "backspace":
        return replace(state, text=state.text[:-1])
    return replace(state, text=(state.text + key)[:40]) if len(key) == 1 and key.isprintable() else state


def _confirmed(state: ScreenState, key: str) -> Pressed:
    if key == "a":
        return Pressed(state, snapshot="all")
    if key == "y" and state.selected is not None:
        return Pressed(state, snapshot=str(state.selected[0]))
    return Pressed(replace(state, message="no snapshot was requested"))
