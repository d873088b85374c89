"""Removes what exports of ended processes have left in the folders of other runs.

A raw trace may have gigabytes, and nobody may ever use the run folder again in which it was left. So a reservation in
the folder of this machine names the folder to which its export writes; see `export_space`.

That folder may be on a file system that hangs. So only a thread of its own opens it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from telemetry.snapshot.export_space import Reservation, age_seconds, destination
from telemetry.snapshot.private_folder import open_folder
from telemetry.snapshot.store import PARTIAL
from telemetry.util.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from telemetry.util.errors import ErrorLog


def start_sweep(shared: Path, is_gone: Callable[[str, float], bool], errors: ErrorLog) -> OwnThread | None:
    """Start `sweep_elsewhere` on a thread. Without leftovers there is nothing to start, and the result is None.

    Raises:
        OSError: the folder of this machine cannot be read, or does not belong to this user alone.
        RuntimeError: no thread can be started.
    """

    def run() -> None:
        with errors.contained("snapshot"):
            sweep_elsewhere(shared, is_gone)

    if not _left(shared, is_gone):
        return None
    thread = OwnThread(run, name="telemetry-sweep")
    thread.start()
    return thread


def sweep_elsewhere(shared: Path, is_gone: Callable[[str, float], bool]) -> None:
    """Remove unfinished exports of processes that have ended, in the folders of all runs, and their reservations.

    Args:
        shared: the folder of this machine.
        is_gone: whether the process of an owner has certainly ended, given the seconds since it wrote its file.

    Raises:
        OSError: the folder of this machine cannot be read, or does not belong to this user alone.
    """
    for name, owner, place in _left(shared, is_gone):
        try:
            with open_folder(place) as folder:
                partial = f"{PARTIAL}{owner}"
                if partial in folder.names() and not is_gone(owner, age_seconds(folder.fd, partial)):
                    continue
                folder.remove(partial)
        except (FileNotFoundError, NotADirectoryError):
            if not place.parent.parent.is_dir():  # what it is in is gone, too: perhaps that is not mounted now
                continue
        except OSError:
            continue  # the reservation stays, so that a later agent tries again
        with open_folder(shared) as folder:
            folder.remove(name)


def _left(shared: Path, is_gone: Callable[[str, float], bool]) -> list[tuple[str, str, Path]]:
    """Reservations of processes that have ended: name of the file, owner, and the folder that it names."""
    found = []
    if shared.exists():
        with open_folder(shared) as folder:
            for name in folder.names():
                reservation = Reservation.parse(name)
                if reservation is not None and is_gone(reservation.owner, age_seconds(folder.fd, name)):
                    place = destination(folder, name)
                    if place is not None:
                        found.append((name, reservation.owner, place))
    return found
