"""``telemetry trace`` reads any bytes within bounds: real recordings, damaged and hostile files, folders."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from telemetry.cli import main
from telemetry.trace import files as scanner_module
from telemetry.trace.files import FileStream, ReadLimits, Scanner, TraceError
from telemetry.trace.reader import read_trace
from tests.trace_files import kernel, write, x

ROOT = Path(__file__).parents[1]
WORKERS0 = Path(__file__).parent / "traces" / "v100_resnet50_workers0.json.gz"
WHOLE = WORKERS0.read_bytes()
Done = namedtuple("Done", "returncode stdout stderr")


@pytest.fixture
def run(capsys):
    def ran(*arguments):
        try:
            status = main(["trace", *map(str, arguments)])
        except SystemExit as leaving:
            status = leaving.code
        return Done(status, *capsys.readouterr())

    return ran


@pytest.fixture
def as_json(run):
    def read(*arguments):
        done = run(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return read


def process(*arguments, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "telemetry", "trace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, errors="replace")


# -- the command ---------------------------------------------------------------------------------------------------
# The goldens have its text and its JSON.


def test_the_figures_are_one_screen_and_then_come_the_tables(run):
    screen, _, tables = run(WORKERS0).stdout.partition("\n\nstep ")
    assert len(screen.splitlines()) <= 30
    assert "DataLoader      34.6 %    62.5 ms  ##############" in screen
    assert "HtoD     pageable      6" in tables


def test_neither_torch_nor_numpy_is_needed(tmp_path):
    for name in ("torch", "numpy", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not needed')")
    done = process(WORKERS0, "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_is_a_list_by_rank_and_what_is_no_trace_is_passed_over(tmp_path, run, as_json):
    (tmp_path / "b.json").write_text(json.dumps({"not": "a trace"}))
    (tmp_path / "deep").mkdir()
    for rank in (1, 0):
        file = write(tmp_path, [x("cpu_op", "a", 1, 2)], f"deep/rank-{rank}.pt.trace.json.gz")
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert [trace["rank"] for trace in as_json(tmp_path)] == [0, 1]
    assert run(tmp_path).stdout.splitlines()[0].split()[:2] == ["rank", "file"]


def test_links_in_a_folder_are_not_followed(tmp_path, run, as_json):
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret.json"
    secret.write_bytes(gzip.decompress(WHOLE))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").symlink_to(secret)
    (folder / "b.json").symlink_to("../outside/secret.json")
    (folder / "c").symlink_to(tmp_path / "outside")
    (folder / "d.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "e.json")
    os.link(secret, folder / "f.txt")
    done = run(folder, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no trace in" in done.stderr
    assert as_json(folder / "a.json")["rank"] is None  # named by the user: that is no plant
    with pytest.raises(TraceError, match="cannot be opened"):  # one that was put there after the folder was listed
        read_trace(folder / "a.json", follow=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02", "is no JSON"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut off or damaged near byte 17 of its JSON"),
        (WHOLE[:5000], "cut off or damaged near byte 5000 of the compressed file"),
        (WHOLE[:5000] + b"\x55" * 3000 + WHOLE[8000:], "cut off or damaged near byte"),
        (b'{"traceEvents": [{"ph": "X" "cat": 1}]}', "cut off or damaged near byte 17"),
        (b'{"traceEvents" [', "cut off or damaged near byte 15"),
        (b'{"traceEvents": 5}', "it has no traceEvents"),
        (b'{"traceEvents": []}', "no operator, runtime call or kernel"),
        (b"[" * 100_000, "cut off or damaged near byte 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path, content, says, run):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    alone = run(file, "--json")
    assert (alone.returncode, alone.stdout) == (1, "")
    assert alone.stderr.startswith(f"telemetry: {file} ")
    assert says in alone.stderr
    (tmp_path / "good.json.gz").write_bytes(WHOLE)
    folder = run(tmp_path, "--json")
    assert len(json.loads(folder.stdout)) == 1
    assert folder.returncode == (0 if "no traceEvents" in says or "no operator" in says else 1)
    assert (says in folder.stderr) == bool(folder.returncode)


def test_what_is_no_file_is_a_clear_error(tmp_path, run):
    os.mkfifo(tmp_path / "fifo")
    for path, says in (
        (tmp_path / "none", "cannot be opened: No such file or directory"),
        ("/dev/zero", "is no regular file"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        (tmp_path / "fifo", "is no regular file"),
        (tmp_path, "there is no trace in"),
    ):
        done = run(path)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    assert run(WORKERS0, "--max-bytes", "1000").stderr.count("larger than 1000 bytes uncompressed") == 1
    assert run(WORKERS0, "--max-bytes", "-1").returncode == 2


def test_names_cannot_command_the_terminal(tmp_path, as_json):
    name = "evil\x1b]0;title\x07\x9b31m\u202e\n"
    file = write(tmp_path, [x("cpu_op", name, 1, 2), kernel(1, 2, 1, name=name)], "a\x1bb.json")
    for encoding in ("utf-8", "ascii"):
        done = process(file, PYTHONIOENCODING=encoding)
        assert done.returncode == 0
        assert not {c for c in done.stdout if not c.isprintable()} - {"\n"}
    assert as_json(file)["operators"][0]["name"] == name


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"'{sys.executable}' -m telemetry trace '{WORKERS0}' --json | head -c 10"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            pass
        return torch.randn(8), index % 2


@pytest.mark.parametrize(("workers", "iterator"), [(0, "SingleProcess"), (2, "MultiProcessing")])
def test_a_live_recording_of_this_torch_shows_the_data_loader(tmp_path, workers, iterator, as_json):
    """In traces of newer torch the wait for a batch is an annotation, for which TensorBoard's tool shows 0."""
    file, net, measured = tmp_path / "rank7.pt.trace.json.gz", nn.Linear(8, 2), []
    plan = schedule(wait=0, warmup=1, active=4, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, with_stack=workers > 0) as profiler:
        loader = iter(DataLoader(Slow(), batch_size=4, num_workers=workers))
        for _ in range(5):
            start = time.perf_counter()
            batch, labels = next(loader)
            measured.append(time.perf_counter() - start)
            nn.functional.cross_entropy(net(batch), labels).backward()
            profiler.step()
    profiler.export_chrome_trace(str(file))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    waits = [e for e in events if e.get("name", "").startswith("enumerate(DataLoader)#")]
    assert {e["cat"] for e in waits} == {"user_annotation"}
    assert all(iterator in e["name"] for e in waits)
    trace = as_json(file)
    assert [step["step"] for step in trace["steps"]] == [1, 2, 3, 4]
    assert (trace["rank"], trace["device"]) == (7, None)
    assert {*trace["gpu"].values(), *trace["temporal"].values()} == {None}
    for step in trace["steps"]:
        assert sum(step["categories"].values()) == pytest.approx(step["seconds"])
        assert step["categories"]["Kernel"] == 0
    if workers:
        return
    for step in trace["steps"]:  # what the loop itself saw; its next() does a little more than the annotation
        assert step["categories"]["DataLoader"] == pytest.approx(measured[step["step"]], rel=0.1)
    assert trace["average"]["categories"]["DataLoader"] > 0.5
    assert trace["advice"][0]["action"].startswith("load batches in worker processes")


# -- the stream of JSON --------------------------------------------------------------------------------------------


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
    return [event for batch in scanner.batches() for event in batch], scanner


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
pieces = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(deadline=None, max_examples=300)
@given(events, st.dictionaries(texts, values, max_size=3), layouts, pieces)
def test_any_json_cut_anywhere_is_read_as_a_whole_would_be(trace, head, layout, sizes):
    head = {key: value for key, value in head.items() if key != "traceEvents"}
    wanted = {"distributedInfo": {"rank": 3}, "deviceProperties": [{"id": 0}]}
    for ascii_only in (True, False):
        data = json.dumps({**head, "traceEvents": trace, **wanted}, ensure_ascii=ascii_only, **layout).encode()
        kept, scanner_module.CHUNK = scanner_module.CHUNK, sizes[0]
        try:
            found, scanner = read(data, sizes)
        finally:
            scanner_module.CHUNK = kept
        assert found == msgspec.json.decode(data)["traceEvents"]
        assert (scanner.metadata, scanner.repaired) == (wanted, False)


@settings(deadline=None, max_examples=100)
@given(events, st.data(), st.binary(max_size=200))
def test_a_file_that_is_cut_off_or_goes_on_with_any_bytes_is_an_error_and_nothing_else(trace, data, more):
    whole = json.dumps({"traceEvents": trace}).encode()
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    with pytest.raises(TraceError, match="cut off"):
        read(cut)
    with contextlib.suppress(TraceError):
        read(cut + more)


def test_what_is_no_json_but_can_be_read():
    assert read(b'\xef\xbb\xbf [ {"a": 1} , {"b": [2]} ]\n')[0] == [{"a": 1}, {"b": [2]}]
    found, scanner = read(
        b'{"traceEvents": [{"name": "ok"}, {"bw": nan, "x": -inf, "y": N/A, "z": NaN, "name": "nan N/A"}, '
        b'{"name": "\xff\x01"}, {"name": "\\ud800"}]}'
    )
    assert found[1] == {"bw": None, "x": None, "y": None, "z": None, "name": "nan N/A"}
    assert [event["name"] for event in found] == ["ok", "nan N/A", "\ufffd\x01", "\ud800"]
    assert scanner.repaired


# -- bounds --------------------------------------------------------------------------------------------------------


def test_gzip_of_several_members_with_padding_or_cut_off_anywhere(tmp_path):
    def source(content):
        (tmp_path / "a.json").write_bytes(content)
        with contextlib.closing(FileStream(tmp_path / "a.json", ReadLimits())) as opened:
            return b"".join(iter(opened.read, b""))

    assert source(gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two") + b"\0" * 100) == b"one two"
    whole = gzip.compress(bytes(range(256)) * 4000)
    for size in (2, 12, len(whole) // 2, len(whole) - 1):
        with pytest.raises(TraceError, match="cut off"):
            source(whole[:size])


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
    command = [sys.executable, "-c", BOMB_READER, str(tmp_path / "bomb.json.gz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    message, grown_kib = done.stdout.splitlines()
    assert "bomb.json.gz" in message
    assert int(grown_kib) < 100 * 1024


def test_the_number_of_events_and_the_size_of_one_are_capped(tmp_path):
    file = write(tmp_path, [x("cpu_op", "op", i, 1) for i in range(1000)])
    with pytest.raises(TraceError, match="more than 500 events"):
        read_trace(file, ReadLimits(max_events=500))
    with pytest.raises(TraceError, match="near byte 17"):
        read(b'{"traceEvents": [{"a": "' + b"x" * 5_000_000, [4096], ReadLimits(max_event_bytes=1_000_000))
