"""Controls: healthy runs, in which the agent must find no stall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass

from .specimen import Specimen, words


def _healthy(name: str, script: str, arguments: str, about: str, **more: object) -> Specimen:
    return Specimen(f"healthy-{name}", script, (), about, words(arguments), **more)  # type: ignore[arg-type]


CONTROLS: Final = (
    _healthy("fast-loader", "in_memory", "", "all in memory"),
    _healthy("compute-bound", "pictures", "--num-workers 2 --picture-width 240 --width 48", "two workers suffice"),
    _healthy("store-8-workers", "object_store", "--num-workers 8 --latency-ms 4", "enough workers for a remote store"),
    _healthy("mount-ahead", "network_folder", "--num-workers 4 --round-trip-ms 2", "a loader read one ahead"),
    _healthy("thread", "prefetch_thread", "", "prefetching on another thread"),
    _healthy("thread-rollouts", "rollouts", "--ahead 4 --move-ms 0.5", "a watched source that is played ahead"),
    _healthy("evaluation", "evaluation", "--num-workers 2", "long evaluations on slow storage between epochs"),
    _healthy(
        "evaluation-model", "evaluation", "--num-workers 2 --around model", "gradients off around the model alone"
    ),
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
