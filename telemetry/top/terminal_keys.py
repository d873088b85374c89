"""The keys of a terminal, one by one, from the bytes that it sends."""

from __future__ import annotations

import codecs
import re
from typing import Final

_NAMES: Final = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1bOH": "home", b"\x1bOF": "end", b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace", b"\x1b": "escape",
}  # fmt: skip

_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O[ -~])")
_UNFINISHED: Final = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*|O)?\Z")


class KeyDecoder:
    """Turns bytes into keys: a character, or a name such as ``page up``. Sequences that it does not know are left out.

    Args:
        encoding: of the terminal.
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        self._pending = b""
        self._text = codecs.getincrementaldecoder(encoding)("ignore")

    def keys(self, sent: bytes) -> list[str]:
        """The keys that are whole now. The rest of a sequence may come with the next bytes."""
        data, self._pending = self._pending + sent, b""
        found: list[str] = []
        while data:
            match = _SEQUENCE.match(data)
            if match is not None:
                found += [_NAMES[match[0]]] if match[0] in _NAMES else []
                data = data[match.end() :]
            elif _UNFINISHED.match(data):
                self._pending = data
                break
            else:
                byte, data = data[:1], data[1:]
                found += [_NAMES[byte]] if byte in _NAMES else [c for c in self._text.decode(byte) if c.isprintable()]
        return found

    def rest(self) -> list[str]:
        """No more bytes have come for a while: an escape alone is the key."""
        pending, self._pending = self._pending, b""
        return ["escape"] if pending == b"\x1b" else []
