"""The specimens: training scripts with their arguments, and what the agent must find in them.

A script is written as a person would write it. Its problem is in its own settings and data. A specimen states the true
cause, not the cause that the agent names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.campaign.specimen import Specimen

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"

_ALONE: Final = """
loader_on_training_thread
    main-jpeg | pictures | | Pillow decodes on the training thread
    main-text | text | | collate_fn tokenises; next() by hand
    main-store | object_store | | HTTP object store, no workers
    main-tar | tar_shards | | IterableDataset over tar shards
    main-mount | network_folder | | network folder; loader read one ahead
    main-database | database | | SQLite rows, compressed JSON
    main-accumulate | text | --accumulate 4 --words 1000 | four batches an update, tokenised on the training thread
    main-zipped | two_loaders | --unlabelled-ms 6 | two loaders zipped, one slow; neither has workers
workers_cpu_bound
    cpu-jpeg | pictures | --num-workers 1 | one worker decodes JPEG
    cpu-text | text | --num-workers 1 --start-method spawn --words 3000 | one spawned worker tokenises
    cpu-audio | audio | --num-workers 1 --persistent-workers True --clip-seconds 1.5 | Trainer class, spectrograms in one persistent worker
    cpu-tar | tar_shards | --num-workers 1 | tar shards decoded by one worker
    cpu-database | database | --num-workers 1 --start-method forkserver | SQLite rows in a forkserver worker
    cpu-threads | decode_pool | | the worker decodes in a thread pool
    cpu-program | decode_pool | --how program | the worker has a program unpack
workers_io_bound
    io-store | object_store | --num-workers 2 --latency-ms 20 | HTTP object store
    io-bandwidth | object_store | --num-workers 2 --object-bytes 200000 --megabytes-per-second 12 --start-method spawn | large objects over connections of limited bandwidth, spawned workers
    io-mount | network_folder | --num-workers 1 --round-trip-ms 10 | network folder, loader read one ahead
    io-zipped | two_loaders | --unlabelled-ms 15 --num-workers 1 | two loaders zipped; the one with a worker is slow
workers_throttled
    throttled-jpeg | pictures | --num-workers 6 --picture-width 1280 | six workers decode large JPEG files on two cores
    throttled-one-core | text | --num-workers 3 --words 6000 | the job has one core; three workers tokenise
    throttled-audio | audio | --num-workers 6 --clip-seconds 4 --start-method spawn | six spawned workers compute spectrograms on two cores
    crowded-jpeg | pictures | --num-workers 8 | eight workers keep ahead, and take the core from the training thread itself: it computes, and hardly waits
worker_startup
    startup-fork | short_epochs | | short epochs; every worker reads an index anew
    startup-spawn | short_epochs | --start-method spawn --samples 800 --index-entries 10 | epochs of a second with spawned workers
    startup-evaluated | short_epochs | --num-workers 4 --samples 240 --held-out 64 --index-entries 80000 | short epochs with an evaluation after each
    startup-reshuffled | reshuffled | | a stream that prepares each epoch anew, in persistent workers
    startup-curriculum | curriculum | | a new DataLoader for every short epoch
uneven_batches
    uneven-cold-store | object_store | --num-workers 4 --latency-ms 0.5 --cold-every 320 --cold-seconds 0.6 | every 20th batch has an object on cold storage
    uneven-books | long_documents | | every so often a document as long as a book
    uneven-shards | tar_shards | --num-workers 4 --picture-width 160 --shard-pictures 320 --open-seconds 1 | each remote shard is slow to open
batch_transfer
    transfer-numpy | clips | --batch-size 24 | NumPy batches of 29 MB, pickled
    transfer-graphs | graphs | | hundreds of small tensors a batch
    transfer-objects | annotations | | annotations as Python objects, a spawned worker
loader_on_training_thread
    sampler | slow_sampler | | a slow batch sampler, which runs on the training thread whatever the workers do
    sampler-lookup | slow_sampler | --lookup-ms 20 --samples 2000 | a batch sampler that asks a server for every batch
worker_stuck
    stuck-store | object_store | --num-workers 4 --latency-ms 0.5 --silent-after 12 --silent-seconds 20 | one request to a store is not answered
    stuck-lock | locked_index | | workers wait for a file lock
    stuck-single | object_store | --num-workers 1 --latency-ms 0.5 --silent-after 12 --silent-seconds 20 --start-method spawn --persistent-workers True | the only worker, spawned, gets no answer
source_slow
    watched-stream | watched_stream | | a watched stream of compressed JSON, tokenised
    watched-rollouts | rollouts | | a watched environment far away; explicit steps
checkpoint
    checkpoint-torch | checkpoints | | torch.save of 250 MB
    checkpoint-dcp | checkpoints | --how dcp | torch.distributed.checkpoint of 250 MB
    checkpoint-phase | checkpoints | --how pickle | a checkpoint of its own kind, said with phase()
loader_on_training_thread or checkpoint
    two-reads-checkpoints | two_problems | --checkpoint-every 5 | reads without workers, and uploads of checkpoints
gc_pause
    gc-loop | memory_hygiene | | gc.collect() in the loop, a large heap
    gc-callback | memory_hygiene | --callback --collect-every 3 --records 50000 | gc.collect() in a callback every third step
    gc-sampler | memory_hygiene | --num-workers 2 --in-sampler --records 200000 --collect-every 5 | gc.collect() in the batch sampler, inside next() of a loader with workers
    gc-timer | memory_hygiene | --timer 0.3 | gc.collect() by the clock, on a thread of its own
recompiling
    recompiling-lengths | compiled | --sizes static | torch.compile without dynamic shapes, 200 lengths of documents
    recompiling-counter | compiled | --count number --lengths 1 | the compiled model counts its steps in an attribute
straggler or loader_on_training_thread
    straggler-loader | ddp | --slow loader | two ranks; one reads from slow storage
straggler
    straggler-compute | ddp | --slow compute | two ranks; one computes more slowly
    straggler-books | ddp | --slow books --slow-rank 0 --batch-size 4 | four ranks; one keeps statistics for all
straggler or unknown
    stuck-rank | ddp | --slow hang --hang-seconds 45 | two ranks; one hangs for 45 s (unknown, to itself), and its peer in the collective
unknown
    stuck-run | dashboard | --silent-seconds 45 | the training thread waits 45 s for an experiment server: a stuck step without a loader's part in it
healthy
    healthy-fast-loader | in_memory | | all in memory
    healthy-compute-bound | pictures | --num-workers 2 --picture-width 240 --width 48 | two workers suffice
    healthy-store-8-workers | object_store | --num-workers 8 --latency-ms 4 | enough workers for a remote store
    healthy-mount-ahead | network_folder | --num-workers 4 --round-trip-ms 2 | a loader read one ahead
    healthy-thread | prefetch_thread | | prefetching on another thread
    healthy-thread-rollouts | rollouts | --ahead 4 --move-ms 0.5 | a watched source that is played ahead
    healthy-evaluation | evaluation | --num-workers 2 | long evaluations on slow storage between epochs
    healthy-evaluation-model | evaluation | --num-workers 2 --around model | gradients off around the model alone
    healthy-accumulation | text | --accumulate 4 --words 60 --width 64 | four batches an update
    healthy-persistent | short_epochs | --persistent-workers True --samples 320 | short epochs with persistent workers
    healthy-short-epochs-main | in_memory | --samples 64 | epochs of four steps without workers
    healthy-tar | tar_shards | --num-workers 1 --picture-width 160 | tar shards, one worker
    healthy-listing | tar_shards | --num-workers 1 --picture-width 160 --listing-seconds 8 | the first batch is 8 s in coming
    healthy-jitter | object_store | --num-workers 4 --latency-ms 1 --cold-every 320 --cold-seconds 0.06 | hidden
    healthy-gan | gan | | two networks and optimizers; a slow start
    healthy-memmap | memmap_tokens | | no DataLoader at all
    healthy-two-loaders | two_loaders | | two loaders zipped, both fast
    healthy-checkpoints | checkpoints | --checkpoint-every 150 --table-megabytes 20 | seldom checkpoints
    healthy-gc | memory_hygiene | --records 2000 --collect-every 50 | seldom collections of a small heap
    healthy-compiled | compiled | --lengths 50 | torch.compile, which takes any length after the second
    healthy-spawn | audio | --num-workers 2 --clip-seconds 0.3 --start-method spawn | spawned, long epochs
    healthy-ddp | ddp | | two equal ranks
"""
"""By cause: name, script, arguments, and the kind of script."""

_STUCK_SECONDS: Final = 40.0
_HUNG_SECONDS: Final = 68.0
_FREEZE: Final = {"gc_pause": ("--gc-freeze",)}
_SELDOM: Final = {"checkpoint": lambda times: ("--checkpoint-every", str(10 * times))}
_MENDED: Final = {"straggler": ("--slow", "nothing")}


def _workers(count: int) -> tuple[str, ...]:
    """Workers for a stream. The advice has no setting, because the stream must be divided first. This one is."""
    return ("--num-workers", str(count))


_MORE: Final[dict[str, dict[str, Any]]] = {
    "throttled-jpeg": {"cores": 2},
    "throttled-one-core": {"cores": 1},
    "throttled-audio": {"cores": 2},
    "crowded-jpeg": {"cores": 2},
    "main-tar": {"remedies": {"loader_on_training_thread": _workers}},
    "cpu-tar": {"remedies": {"workers_cpu_bound": _workers}},
    "startup-reshuffled": {"remedies": {"worker_startup": lambda times: ("--samples", str(320 * times))}},
    "uneven-books": {
        "remedies": {"uneven_batches": ("--sharing-strategy", "file_system", "--prefetch-factor", "27")}
    },
    "transfer-numpy": {"remedies": {"batch_transfer": ("--tensors",)}},
    "transfer-graphs": {"remedies": {"batch_transfer": ("--joined",)}},
    "transfer-objects": {"remedies": {"batch_transfer": ("--packed",)}},
    "sampler": {
        "remedies": {"loader_on_training_thread": ("--precomputed", "2000")}, "takes_settings": False,
    },
    "sampler-lookup": {
        "remedies": {"loader_on_training_thread": ("--precomputed", "2000", "--lookup-ms", "0")}, "takes_settings": False,
    },
    "stuck-store": {"seconds": _STUCK_SECONDS},
    "stuck-lock": {"seconds": _STUCK_SECONDS},
    "stuck-single": {"seconds": _STUCK_SECONDS},
    "watched-rollouts": {"remedies": {"source_slow": ("--ahead", "4")}, "takes_settings": False},
    "checkpoint-torch": {"remedies": _SELDOM},
    "checkpoint-dcp": {"remedies": _SELDOM},
    "checkpoint-phase": {"remedies": _SELDOM},
    "two-reads-checkpoints": {"both": True},
    "gc-loop": {"remedies": _FREEZE},
    "gc-callback": {"remedies": _FREEZE},
    "gc-sampler": {"remedies": _FREEZE},
    "gc-timer": {"remedies": _FREEZE},
    "straggler-loader": {"ranks": 2, "slow_rank": 1},
    "straggler-compute": {"remedies": _MENDED, "ranks": 2, "slow_rank": 1},
    "straggler-books": {"remedies": _MENDED, "ranks": 4, "slow_rank": 0},
    "stuck-rank": {"ranks": 2, "slow_rank": 1, "seconds": _HUNG_SECONDS},
    "stuck-run": {"seconds": _HUNG_SECONDS},
    "healthy-ddp": {"ranks": 2},
}  # fmt: skip


def _alone() -> Iterable[Specimen]:
    causes: tuple[str, ...] = ()
    for line in _ALONE.strip().splitlines():
        if not line.startswith(" "):
            causes = () if line == "healthy" else tuple(line.split(" or "))
            continue
        name, script, arguments, about = map(str.strip, line.split("|"))
        path, more = SCRIPTS / f"{script}.py", _MORE.get(name, {})
        yield Specimen(
            name=name, script=path, causes=causes, about=about, arguments=tuple(arguments.split()), **more
        )  # fmt: skip


def _job(name: str, about: str, arguments: str = "", **more: Any) -> Specimen:
    """Of four ranks on two emulated nodes."""
    shape: dict[str, Any] = {"ranks": 4, "nodes": 2, "seconds": 50.0, "takes_settings": False}
    path = SCRIPTS / "job.py"
    return Specimen(name=name, script=path, about=about, arguments=tuple(arguments.split()), **(shape | more))


def _straggler(name: str, causes: str, odd: int, about: str, reason: str) -> Specimen:
    more = {"causes": ("straggler", *causes.split()), "slow_rank": odd, "reason": reason, "whole_node": name == "node"}
    return _job(f"job-{name}", about, f"--slow {name}", **more)


def _hang(name: str, kind: str, odd: int, about: str) -> Specimen:
    return _job(f"job-hang-{name}", about, f"--hang {name}", slow_rank=odd, hang=kind, seconds=80.0)


ALL: Final = (
    *_alone(),
    _straggler("loader", "loader_on_training_thread", 3, "one rank reads from slow storage", "waits for data"),
    _straggler("compute", "", 1, "one rank computes more slowly", "takes longer to compute a step"),
    _straggler("evaluation", "", 0, "one rank evaluates for all", "is in an evaluation"),
    _straggler("checkpoint", "checkpoint", 2, "one rank writes checkpoints to a store", "is in a checkpoint"),
    _straggler(
        "node", "", 2, "all ranks of a node compute more slowly",
        "all 2 ranks of that node are waited for, so the node is slow",
    ),
    _hang("fetch", "fetch", 2, "storage stops to answer one rank"),
    _hang("lock", "compute", 0, "one rank waits for a lock in a step"),
    _hang("left", "rank_left", 3, "one rank has fewer batches"),
    _hang("order", "mismatch", 1, "one rank calls a collective that the others do not"),
    _job("healthy-job", "four equal ranks on two nodes"),
)  # fmt: skip
STALLS: Final = tuple(s for s in ALL if not s.healthy and s.nodes == 1)
CONTROLS: Final = tuple(s for s in ALL if s.healthy and s.nodes == 1)
