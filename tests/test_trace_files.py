"""The stream of a trace's JSON: any bytes, cut anywhere, within bounds."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.trace import files as scanner_module
from telemetry.trace.files import ReadLimits, Scanner, TraceError, open_stream
from telemetry.trace.reader import read_trace


class Pieces:
    """A source that gives its bytes in the pieces it is told to."""

    path = Path("pieces.json")

    def __init__(self, data: bytes, sizes: list[int]):
        self.data, self.sizes, self.produced, self.turn = data, sizes, 0, 0

    def read(self) -> bytes:
        size = self.sizes[self.turn % len(self.sizes)]
        self.turn += 1
        piece = self.data[self.produced : self.produced + size]
        self.produced += len(piece)
        return piece


def read(data: bytes, sizes: list[int] = [7], limits: ReadLimits | None = None):
    scanner = Scanner(Pieces(data, sizes), limits or ReadLimits())
    events = [event for batch in scanner.batches() for event in batch]
    return events, scanner


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", "}, {", '},\n {"', '"}]}', "\\u0022", "[{", "nan", "N/A"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
events = st.lists(st.dictionaries(texts, values, max_size=5) | values, max_size=12)
layouts = st.sampled_from([{"indent": None}, {"indent": 2}, {"indent": 0}, {"separators": (",", ":")}])


@settings(deadline=None, max_examples=300)
@given(
    events, st.dictionaries(texts, values, max_size=3), layouts, st.lists(st.integers(1, 40), min_size=1, max_size=6)
)
def test_any_json_cut_anywhere_is_read_as_a_whole_would_be(trace, head, layout, sizes):
    head = {key: value for key, value in head.items() if key != "traceEvents"}
    document = {**head, "distributedInfo": {"rank": 3}, "traceEvents": trace, "deviceProperties": [{"id": 0}]}
    for ascii_only in (True, False):
        data = json.dumps(document, ensure_ascii=ascii_only, **layout).encode()
        kept, chunk = scanner_module.CHUNK, sizes[0]
        scanner_module.CHUNK = chunk
        try:
            found, scanner = read(data, sizes)
        finally:
            scanner_module.CHUNK = kept
        assert found == msgspec.json.decode(data)["traceEvents"]
        assert scanner.metadata == {"distributedInfo": {"rank": 3}, "deviceProperties": [{"id": 0}]}
        assert scanner.repaired == 0


@settings(deadline=None, max_examples=100)
@given(events, st.data())
def test_a_file_cut_off_anywhere_is_an_error_and_no_trace(trace, data):
    whole = json.dumps({"traceEvents": trace}).encode()
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(TraceError, match="cut off"):
        read(whole[:cut])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error_and_nothing_else(data):
    for prefix in (b"", b"{", b'{"traceEvents": [', b'{"traceEvents": [{"a": 1}, '):
        try:
            read(prefix + data)
        except TraceError:
            pass


def test_events_alone_are_a_trace_too():
    assert read(b'\xef\xbb\xbf [ {"a": 1} , {"b": [2]} ]\n')[0] == [{"a": 1}, {"b": [2]}]


def test_bare_words_and_stray_bytes_in_an_event_are_read_all_the_same():
    data = (
        b'{"traceEvents": [{"name": "ok"}, {"bw": nan, "x": -inf, "y": N/A, "name": "nan N/A"}, '
        b'{"name": "\xff\x01"}, {"name": "\\ud800"}]}'
    )
    found, scanner = read(data)
    assert found[1] == {"bw": None, "x": None, "y": None, "name": "nan N/A"}
    assert [event["name"] for event in found] == ["ok", "nan N/A", "\ufffd\x01", "\ud800"]
    assert scanner.repaired == 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\x03\x04", "is no JSON"),
        (b"", "cut off"),
        (b'{"schemaVersion": 1}', "has no traceEvents"),
        (b'{"traceEvents": 5}', "traceEvents is no list at byte 16"),
        (b'{"traceEvents": [{"a": }]}', "an event is no JSON at byte 17"),
        (b'{"traceEvents": [{"a": 1]}', "cut off|no JSON"),
        (b'{"traceEvents" [', "a colon is expected at byte 15"),
        (b"{5: 1}", "a name is expected at byte 1"),
        (b'{"traceEvents": [}', "is not expected at byte 17"),
        (b'{"a": ' + b"[" * 100_000, "nested more than 64 deep"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "nested more than 64 deep"),
        (b'{"traceEvents": [{"a": "' + b"x" * 5_000_000, "longer than 1000000 bytes"),
    ],
)
def test_what_is_wrong_and_where(data, says):
    with pytest.raises(TraceError, match=says):
        read(data, [4096], ReadLimits(max_event_bytes=1_000_000))


def source(path: Path, limits: ReadLimits = ReadLimits()) -> bytes:
    with open_stream(path, limits) as opened:
        return b"".join(iter(opened.read, b""))


def test_gzip_of_several_members_with_padding(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two") + b"\0" * 100)
    assert source(file) == b"one two"


def test_a_gzip_that_is_cut_off_anywhere(tmp_path):
    whole = gzip.compress(bytes(range(256)) * 4000)
    file = tmp_path / "a.json.gz"
    for size in (2, 12, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(TraceError, match="cut off"):
            source(file)


def test_a_link_is_not_opened_where_it_must_not_be_followed(tmp_path):
    """Also not one that was put there after the folder was listed."""
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "b.json").symlink_to("a.json")
    assert source(tmp_path / "b.json") == b"{}"
    with (
        pytest.raises(TraceError, match="cannot be opened"),
        open_stream(tmp_path / "b.json", ReadLimits(), follow=False),
    ):
        pass


def test_size_is_capped_whatever_the_compression(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b" " * 300_000)
    with pytest.raises(TraceError, match="larger than 200000 bytes.*--max-bytes"):
        source(file, ReadLimits(max_bytes=200_000))


BOMB_READER = """
import resource, sys
from telemetry.trace.reader import read_trace, TraceError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_trace(sys.argv[1])
except TraceError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b'{"traceEvents": [', b" " * 65536),
        (b'{"traceEvents": [{"name": "', b"x" * 65536),
        (b"[", b"[" * 65536),
        (b'{"traceEvents": [', b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{"stream":7}},' * 900),
    ],
)
def test_a_gzip_bomb_is_refused_with_bounded_memory(tmp_path, head, body):
    """A gigabyte from a megabyte: refused early, and never held."""
    repeated = gzip.compress(body * 256)  # a file may have many members
    with (tmp_path / "bomb.json.gz").open("wb") as file:
        file.write(gzip.compress(head))
        for _ in range((1 << 30) // len(body) // 256):
            file.write(repeated)
    done = subprocess.run(
        [sys.executable, "-c", BOMB_READER, str(tmp_path / "bomb.json.gz")],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    message, grown_kib = done.stdout.splitlines()
    assert "bomb.json.gz" in message
    assert int(grown_kib) < 100 * 1024


def test_the_number_and_the_names_of_events_are_capped(tmp_path):
    def write(count, name):
        rows = ({"ph": "X", "cat": "cpu_op", "name": name(i), "ts": i, "dur": 1, "tid": 1} for i in range(count))
        (tmp_path / "t.json").write_text(json.dumps({"traceEvents": list(rows)}))
        return tmp_path / "t.json"

    with pytest.raises(TraceError, match="more than 500 events"):
        read_trace(write(1000, lambda i: "op"), ReadLimits(max_events=500))
    with pytest.raises(TraceError, match="names are longer than 1000 bytes"):
        read_trace(write(1000, lambda i: f"op {i}"), ReadLimits(max_name_bytes=1000))
