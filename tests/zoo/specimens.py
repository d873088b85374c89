"""The specimens: which script, with which arguments, and what is known to be wrong with it.

A script is written as a person would write it; its faults are its own settings and its own data. A specimen says what
is true of it, not what the agent says of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LOADER_SETTINGS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
"""What every script takes on its command line, by the names of DataLoader's arguments."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """One training run whose trouble is known.

    Attributes:
        name: unique.
        script: in ``scripts/``, without its suffix; ``arguments`` are its own.
        causes: what may be named as the cause; more than one where the closed set has two words for it. Empty for a
            healthy control.
        remedies: by cause, the arguments that follow an advice that is no setting of a loader, or a function that
            makes them of its value.
        takes_settings: whether the script has a use for a loader's settings.
        seconds: of training.
        ranks: more than one runs under torchrun; then the peers of ``slow_rank`` have to say that they wait for it.
        cores: how many the run may use; None for all.
        about: the style, in a few words.
    """

    name: str
    script: str
    causes: tuple[str, ...]
    about: str
    arguments: tuple[str, ...] = ()
    remedies: Mapping[str, tuple[str, ...] | Callable[[int], tuple[str, ...]]] = field(default_factory=dict)
    seconds: float = 22.0
    ranks: int = 1
    slow_rank: int | None = None
    cores: int | None = None
    takes_settings: bool = True

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.causes

    def with_advice(self, cause: str, setting: str | None, value: str | None) -> tuple[str, ...] | None:
        """The arguments that follow an advice, after the script's own; None where it cannot be followed here."""
        if setting not in LOADER_SETTINGS:
            remedy = self.remedies.get(cause)
            return remedy(int(value or 0)) if callable(remedy) else remedy
        return (f"--{setting.replace('_', '-')}", value) if self.takes_settings and value is not None else None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _stall(name: str, cause: str, script: str, arguments: str, about: str, **more: object) -> Specimen:
    causes = tuple(cause.split("|"))
    return Specimen(name, script, causes, about, _words(arguments), **more)  # type: ignore[arg-type]


def _healthy(name: str, script: str, arguments: str, about: str, **more: object) -> Specimen:
    return Specimen(f"healthy-{name}", script, (), about, _words(arguments), **more)  # type: ignore[arg-type]


_FREEZE: Final = {"gc_pause": ("--gc-freeze",)}
_SELDOM: Final = {"checkpoint": lambda times: ("--checkpoint-every", str(10 * times))}
_MENDED: Final = {"straggler": ("--slow", "nothing")}
_STUCK_SECONDS: Final = 40.0
_HUNG_SECONDS: Final = 68.0

STALLS: Final = (
    _stall("main-jpeg", "loader_on_training_thread", "pictures", "", "Pillow decodes on the training thread"),
    _stall("main-text", "loader_on_training_thread", "text", "", "collate_fn tokenises; next() by hand"),
    _stall("main-store", "loader_on_training_thread", "object_store", "", "HTTP object store, no workers"),
    _stall("main-tar", "loader_on_training_thread", "tar_shards", "", "IterableDataset over tar shards"),
    _stall("main-mount", "loader_on_training_thread", "network_folder", "", "network folder; loader read one ahead"),
    _stall("main-database", "loader_on_training_thread", "database", "", "SQLite rows, compressed JSON"),
    _stall(
        "main-accumulate",
        "loader_on_training_thread",
        "text",
        "--accumulate 4 --words 1000",
        "four batches an update, tokenised on the training thread",
    ),
    _stall(
        "main-zipped",
        "loader_on_training_thread",
        "two_loaders",
        "--unlabelled-ms 6",
        "two loaders zipped, one slow; neither has workers",
    ),
    _stall("cpu-jpeg", "workers_cpu_bound", "pictures", "--num-workers 1", "one worker decodes JPEG"),
    _stall(
        "cpu-text",
        "workers_cpu_bound",
        "text",
        "--num-workers 1 --start-method spawn --words 3000",
        "one spawned worker tokenises",
    ),
    _stall(
        "cpu-audio",
        "workers_cpu_bound",
        "audio",
        "--num-workers 1 --persistent-workers True --clip-seconds 1.5",
        "Trainer class, spectrograms in one persistent worker",
    ),
    _stall("cpu-tar", "workers_cpu_bound", "tar_shards", "--num-workers 1", "tar shards decoded by one worker"),
    _stall(
        "cpu-database",
        "workers_cpu_bound",
        "database",
        "--num-workers 1 --start-method forkserver",
        "SQLite rows in a forkserver worker",
    ),
    _stall("cpu-threads", "workers_cpu_bound", "decode_pool", "", "the worker decodes in a thread pool"),
    _stall("cpu-program", "workers_cpu_bound", "decode_pool", "--how program", "the worker has a program unpack"),
    _stall("io-store", "workers_io_bound", "object_store", "--num-workers 2 --latency-ms 20", "HTTP object store"),
    _stall(
        "io-bandwidth",
        "workers_io_bound",
        "object_store",
        "--num-workers 2 --object-bytes 200000 --megabytes-per-second 12 --start-method spawn",
        "large objects over connections of limited bandwidth, spawned workers",
    ),
    _stall(
        "io-mount",
        "workers_io_bound",
        "network_folder",
        "--num-workers 1 --round-trip-ms 10",
        "network folder, loader read one ahead",
    ),
    _stall(
        "io-zipped",
        "workers_io_bound",
        "two_loaders",
        "--unlabelled-ms 15 --num-workers 1",
        "two loaders zipped; the one with a worker is slow",
    ),
    _stall(
        "throttled-jpeg",
        "workers_throttled",
        "pictures",
        "--num-workers 6 --picture-width 1280",
        "six workers decode large JPEG files on two cores",
        cores=2,
    ),
    _stall(
        "throttled-one-core",
        "workers_throttled",
        "text",
        "--num-workers 3 --words 6000",
        "the job has one core; three workers tokenise",
        cores=1,
    ),
    _stall(
        "throttled-audio",
        "workers_throttled",
        "audio",
        "--num-workers 6 --clip-seconds 4 --start-method spawn",
        "six spawned workers compute spectrograms on two cores",
        cores=2,
    ),
    _stall(
        "crowded-jpeg",
        "workers_throttled",
        "pictures",
        "--num-workers 8",
        "eight workers keep ahead, and take the core from the training thread itself: it computes, and hardly waits",
        cores=2,
    ),
    _stall("startup-fork", "worker_startup", "short_epochs", "", "short epochs; every worker reads an index anew"),
    _stall(
        "startup-spawn",
        "worker_startup",
        "short_epochs",
        "--start-method spawn --samples 800 --index-entries 10",
        "epochs of a second with spawned workers",
    ),
    _stall(
        "startup-evaluated",
        "worker_startup",
        "short_epochs",
        "--num-workers 4 --samples 240 --held-out 64 --index-entries 80000",
        "short epochs with an evaluation after each",
    ),
    _stall(
        "startup-reshuffled",
        "worker_startup",
        "reshuffled",
        "",
        "a stream that prepares each epoch anew, in persistent workers",
        remedies={"worker_startup": lambda times: ("--samples", str(320 * times))},
    ),
    _stall("startup-curriculum", "worker_startup", "curriculum", "", "a new DataLoader for every short epoch"),
    _stall(
        "uneven-cold-store",
        "uneven_batches",
        "object_store",
        "--num-workers 4 --latency-ms 0.5 --cold-every 320 --cold-seconds 0.6",
        "every 20th batch has an object on cold storage",
    ),
    _stall(
        "uneven-books",
        "uneven_batches",
        "long_documents",
        "",
        "every so often a document as long as a book",
        remedies={"uneven_batches": ("--sharing-strategy", "file_system", "--prefetch-factor", "27")},
    ),
    _stall(
        "uneven-shards",
        "uneven_batches",
        "tar_shards",
        "--num-workers 4 --picture-width 160 --shard-pictures 320 --open-seconds 1",
        "each remote shard is slow to open",
    ),
    _stall(
        "transfer-numpy",
        "batch_transfer",
        "clips",
        "--batch-size 24",
        "NumPy batches of 29 MB, pickled",
        remedies={"batch_transfer": ("--tensors",)},
    ),
    _stall(
        "transfer-graphs",
        "batch_transfer",
        "graphs",
        "",
        "hundreds of small tensors a batch",
        remedies={"batch_transfer": ("--joined",)},
    ),
    _stall(
        "transfer-objects",
        "batch_transfer",
        "annotations",
        "",
        "annotations as Python objects, a spawned worker",
        remedies={"batch_transfer": ("--packed",)},
    ),
    _stall(
        "sampler",
        "loader_on_training_thread",
        "slow_sampler",
        "",
        "a slow batch sampler, which runs on the training thread whatever the workers do",
        remedies={"loader_on_training_thread": ("--precomputed", "2000")},
        takes_settings=False,
    ),
    _stall(
        "sampler-lookup",
        "loader_on_training_thread",
        "slow_sampler",
        "--lookup-ms 20 --samples 2000",
        "a batch sampler that asks a server for every batch",
        remedies={"loader_on_training_thread": ("--precomputed", "2000", "--lookup-ms", "0")},
        takes_settings=False,
    ),
    _stall(
        "stuck-store",
        "worker_stuck",
        "object_store",
        "--num-workers 4 --latency-ms 0.5 --silent-after 12 --silent-seconds 20",
        "one request to a store is not answered",
        seconds=_STUCK_SECONDS,
    ),
    _stall("stuck-lock", "worker_stuck", "locked_index", "", "workers wait for a file lock", seconds=_STUCK_SECONDS),
    _stall(
        "stuck-single",
        "worker_stuck",
        "object_store",
        "--num-workers 1 --latency-ms 0.5 --silent-after 12 --silent-seconds 20 --start-method spawn "
        "--persistent-workers True",
        "the only worker, spawned, gets no answer",
        seconds=_STUCK_SECONDS,
    ),
    _stall(
        "watched-stream",
        "source_slow",
        "watched_stream",
        "",
        "a watched stream of compressed JSON, tokenised",
    ),
    _stall(
        "watched-rollouts",
        "source_slow",
        "rollouts",
        "",
        "a watched environment far away; explicit steps",
        takes_settings=False,
        remedies={"source_slow": ("--ahead", "4")},
    ),
    _stall("checkpoint-torch", "checkpoint", "checkpoints", "", "torch.save of 250 MB", remedies=_SELDOM),
    _stall(
        "checkpoint-dcp",
        "checkpoint",
        "checkpoints",
        "--how dcp",
        "torch.distributed.checkpoint of 250 MB",
        remedies=_SELDOM,
    ),
    _stall(
        "checkpoint-phase",
        "checkpoint",
        "checkpoints",
        "--how pickle",
        "a checkpoint of its own kind, said with phase()",
        remedies=_SELDOM,
    ),
    _stall("gc-loop", "gc_pause", "memory_hygiene", "", "gc.collect() in the loop, a large heap", remedies=_FREEZE),
    _stall(
        "gc-callback",
        "gc_pause",
        "memory_hygiene",
        "--callback --collect-every 3 --records 50000",
        "gc.collect() in a callback every third step",
        remedies=_FREEZE,
    ),
    _stall(
        "gc-sampler",
        "gc_pause",
        "memory_hygiene",
        "--num-workers 2 --in-sampler --records 200000 --collect-every 5",
        "gc.collect() in the batch sampler, inside next() of a loader with workers",
        remedies=_FREEZE,
    ),
    _stall(
        "gc-timer",
        "gc_pause",
        "memory_hygiene",
        "--timer 0.3",
        "gc.collect() by the clock, on a thread of its own",
        remedies=_FREEZE,
    ),
    _stall(
        "straggler-loader",
        "straggler|loader_on_training_thread",
        "ddp",
        "--slow loader",
        "two ranks; one reads from slow storage",
        ranks=2,
        slow_rank=1,
    ),
    _stall(
        "straggler-compute",
        "straggler",
        "ddp",
        "--slow compute",
        "two ranks; one computes more slowly",
        remedies=_MENDED,
        ranks=2,
        slow_rank=1,
    ),
    _stall(
        "straggler-books",
        "straggler",
        "ddp",
        "--slow books --slow-rank 0 --batch-size 4",
        "four ranks; one keeps statistics for all",
        remedies=_MENDED,
        ranks=4,
        slow_rank=0,
    ),
    _stall(
        "stuck-rank",
        "straggler|unknown",
        "ddp",
        "--slow hang --hang-seconds 45",
        "two ranks; one hangs for 45 s (unknown, to itself), and its peer in the collective",
        ranks=2,
        slow_rank=1,
        seconds=_HUNG_SECONDS,
    ),
    _stall(
        "stuck-run",
        "unknown",
        "dashboard",
        "--silent-seconds 45",
        "the training thread waits 45 s for an experiment server: a stuck step without a loader's part in it",
        seconds=_HUNG_SECONDS,
    ),
)

CONTROLS: Final = (
    _healthy("fast-loader", "in_memory", "", "all in memory"),
    _healthy("compute-bound", "pictures", "--num-workers 2 --picture-width 240 --width 48", "two workers suffice"),
    _healthy("store-8-workers", "object_store", "--num-workers 8 --latency-ms 4", "enough workers for a remote store"),
    _healthy("mount-ahead", "network_folder", "--num-workers 4 --round-trip-ms 2", "a loader read one ahead"),
    _healthy("thread", "prefetch_thread", "", "prefetching on another thread"),
    _healthy("thread-rollouts", "rollouts", "--ahead 4 --move-ms 0.5", "a watched source that is played ahead"),
    _healthy("evaluation", "evaluation", "--num-workers 2", "long evaluations on slow storage between epochs"),
    _healthy("accumulation", "text", "--accumulate 4 --words 60 --width 64", "four batches an update"),
    _healthy(
        "persistent",
        "short_epochs",
        "--persistent-workers True --samples 320",
        "short epochs with persistent workers",
    ),
    _healthy("short-epochs-main", "in_memory", "--samples 64", "epochs of four steps without workers"),
    _healthy("tar", "tar_shards", "--num-workers 1 --picture-width 160", "tar shards, one worker"),
    _healthy(
        "listing",
        "tar_shards",
        "--num-workers 1 --picture-width 160 --listing-seconds 8",
        "the first batch is 8 s in coming",
    ),
    _healthy("jitter", "object_store", "--num-workers 4 --latency-ms 1 --cold-every 320 --cold-seconds 0.06", "hidden"),
    _healthy("gan", "gan", "", "two networks and optimizers; a slow start"),
    _healthy("memmap", "memmap_tokens", "", "no DataLoader at all"),
    _healthy("two-loaders", "two_loaders", "", "two loaders zipped, both fast"),
    _healthy("checkpoints", "checkpoints", "--checkpoint-every 150 --table-megabytes 20", "seldom checkpoints"),
    _healthy("gc", "memory_hygiene", "--records 2000 --collect-every 50", "seldom collections of a small heap"),
    _healthy("spawn", "audio", "--num-workers 2 --clip-seconds 0.3 --start-method spawn", "spawned, long epochs"),
    _healthy("ddp", "ddp", "", "two equal ranks", ranks=2),
)

ALL: Final = (*STALLS, *CONTROLS)


def chosen(names: Iterable[str]) -> tuple[Specimen, ...]:
    """The specimens whose names begin with one of ``names``; all of them without any.

    Raises:
        ValueError: no specimen has such a name.
    """
    wanted = tuple(names)
    for name in wanted:
        if not any(specimen.name.startswith(name) for specimen in ALL):
            raise ValueError(f"no specimen's name begins with {name!r}; they are {', '.join(s.name for s in ALL)}")
    return tuple(s for s in ALL if not wanted or s.name.startswith(wanted))
