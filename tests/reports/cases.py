"""The scripts' truth: which cause, line and advice are right, and which advice would do harm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from tests.campaign.specimen import Specimen

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
PUBLIC: Final = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def case(
    name: str, causes: tuple[str, ...] = (), advice: str = "", harmful: str = "", *, script: str = "", **more: Any
) -> Specimen:
    """A script with one environment. Its first line names the public reports that it is after.

    It has a variant ``fixed``, and is judged on all that is said of it.
    """
    path = SCRIPTS / f"{script or name}.py"
    public = ", ".join(PUBLIC.findall(path.read_text(encoding="utf-8").splitlines()[0]))
    how: dict[str, Any] = {"fixed": ("fixed",), "silent": True, "seconds": 45.0}
    return Specimen(
        name=name, script=path, about=public, causes=causes, advice=advice, harmful=harmful, **(how | more)
    )  # fmt: skip


_SPLIT: Final = r"get_worker_info|split|shard"
_WORKERS_ALONE: Final = rf"^num_workers(?!.*({_SPLIT}))"
_NO_COLLECT: Final = r"(remove|without|less often|no|stop|drop|once|not).*gc\.collect|gc\.collect.*(remove|less|once)"
_ONE_ITERATOR: Final = (
    r"(one|once|keep|kept|outside|before|single|the same|reuse).*iter|iter.*(once|kept|outside|before)"
)
_BATCHED: Final = r"__getitems__|BatchSampler|batch_size=None|whole batch|at once"
_FEWER_THREADS: Final = r"set_num_threads|OMP_NUM_THREADS|torch\.set|threads"
_OTHER_PROCESS: Final = r"process|less often|GIL|worker"
_LOG_LESS: Final = r"less often|seldom|every \d+ steps|out of the step"
_GROWTH: Final = r"detach|graph|earlier steps|each step adds|item\(\)"
_SHARED_MEMORY: Final = r"/dev/shm|shared memory"
_LARGER: Final = r"larger|shm-size|prefetch_factor|fewer"
_NO_BATCH: Final = "a first fetch that never ends"
_NO_BATCH_SAID: Final = r"fetch|did not come|first batch|never came"
_VALIDATION: Final = r"num_workers|persistent_workers|batch_size|evaluation|validation"
_FIRST_FETCH: Final = r"buffer|first (fetch|batch)|index|start of (an|each|the) epoch|__iter__"
_READ: Final = r"num_workers"
_OPEN_FILES: Final = r"open files|files were open|descriptor"
_CLOSED: Final = r"clone|cop(y|ies)|file_system|close|ulimit"
_OPEN_ONCE: Final = r"once|keep.*open"

REPORTED: Final = (
    case(
        "unsplit_stream", ("loader_on_training_thread", "duplicate_samples"), _SPLIT, _WORKERS_ALONE, line=True
    ),
    case("iterator_each_step", ("iterator_per_step",), _ONE_ITERATOR, "^(num_workers|prefetch_factor)", line=True),
    case("rows_one_by_one", ("loader_on_training_thread",), _BATCHED, "^num_workers|smaller size", line=True),
    case("one_shard", ("empty_workers",), r"shard|files|num_workers=1", "faster storage|^num_workers.*more", line=True),
    case("collect_each_step", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    case("metrics_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    case("shuffle_buffer", ("worker_startup", "workers_io_bound"), _FIRST_FETCH, "^persistent_workers", line=True),
    case("threads_beyond_cores", ("threads_oversubscribed",), _FEWER_THREADS, "^num_workers"),
    case("histograms_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True, needs="tensorboard"),
    case("kept_graph", ("step_growth",), _GROWTH, "^num_workers", line=True),
    case("validation_without_workers", ("evaluation_loader",), _VALIDATION, line=True),
    case("lock_at_fork", harmful="^num_workers", line=True, end=_NO_BATCH, end_said=_NO_BATCH_SAID),
    case(
        "small_shared_memory", advice=_LARGER, line=True, end="full /dev/shm", end_said=_SHARED_MEMORY,
        shared_memory="60m",
    ),
    case("background_reader", ("reader_thread",), _READ, "background thread|ahead", line=True),
    case("whole_file_in_each_worker", ("duplicate_samples",), _SPLIT, _WORKERS_ALONE, line=True),
    case("collect_in_collate", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    case("validation_one_by_one", ("evaluation_loader",), r"batch_size|larger batch|evaluation", line=True),
    case("anomaly_left_on", ("debug_switch",), "set_detect_anomaly", "^num_workers"),
    case("gradients_each_batch", ("no_sync",), "no_sync", "^num_workers", line=True, ranks=2),
    case("command_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    case("padded_to_longest", ("uneven_steps",), r"by length|similar length", "^num_workers"),
    case("history_rewritten", ("between_loops",), r"append|only what is new", "^num_workers", line=True),
    case("archive_reopened", ("workers_cpu_bound", "workers_throttled"), _OPEN_ONCE, "smaller size", line=True),
    case("replay_in_deque", ("host_work", "step_growth"), r"\blist\b|array", "every 100 steps", line=True),
    case(
        "frame_row_by_row", ("loader_on_training_thread",), r"array|to_numpy", "smaller size", line=True, needs="pandas"
    ),
    case("threads_in_workers", ("threads_oversubscribed",), _FEWER_THREADS, "^num_workers.*more"),
    case("kept_labels", advice=_CLOSED, line=True, end="no descriptor left", end_said=_OPEN_FILES),
)  # fmt: skip
"""The scripts after public reports."""

ALIKE: Final = (
    case(
        "unsplit_stream_in_workers", ("duplicate_samples",), _SPLIT, _WORKERS_ALONE, line=True,
        script="unsplit_stream", variables={"WORKERS": "3"},
    ),
    case("batch_from_helper", ("iterator_per_step",), _ONE_ITERATOR, "^(num_workers|prefetch_factor)", line=True),
    case("table_one_by_one", ("loader_on_training_thread",), _BATCHED, "^num_workers|smaller size", line=True),
    case("two_files", ("empty_workers",), r"shard|files|num_workers=2", "faster storage", line=True),
    case("collect_in_callback", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    case(
        "collect_in_worker", ("own_gc_collect", "workers_cpu_bound"), rf"{_NO_COLLECT}|take .* out of the loader",
        line=True,
        script="collect_in_collate", variables={"WORKERS": "1"},
    ),
    case("json_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    case("tokenising_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    case("index_each_epoch", ("worker_startup", "workers_io_bound"), _FIRST_FETCH, "^persistent_workers", line=True),
    case("weights_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    case("metric_by_items", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    case("shell_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    case("post_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    case("files_left_open", advice=_CLOSED, line=True, end="no descriptor left", end_said=_OPEN_FILES),
    case(
        "files_left_open_in_worker", advice=_CLOSED, end="no descriptor left", end_said=_OPEN_FILES,
        script="files_left_open", variables={"WORKERS": "1"},
    ),
    case("kept_state", ("step_growth",), _GROWTH, "^num_workers", line=True),
    case("walked_history", ("step_growth",), _GROWTH, "^num_workers", line=True),
    case("validation_loader_made_anew", ("evaluation_loader",), r"persistent_workers|once|keep|workers", line=False),
    case("answer_never_comes", harmful="^num_workers", line=True, end=_NO_BATCH, end_said=_NO_BATCH_SAID),
    case(
        "shared_memory_of_prefetching", advice=_LARGER, line=True, end="full /dev/shm", end_said=_SHARED_MEMORY,
        shared_memory="60m",
    ),
    case("background_generator", ("reader_thread",), _READ, line=True),
    case("short_epochs", ("worker_startup",), "^persistent_workers"),
    case("many_small_tensors", ("batch_transfer",), r"fewer|few large|one (large )?tensor|stack"),
)  # fmt: skip
"""Others of the same kinds."""

CONTROLS: Final = (
    case("healthy_grouped", script="padded_to_longest", arguments=("fixed",)),
    *(case(path.stem) for path in sorted(SCRIPTS.glob("healthy_*.py"))),
    case("healthy_reader", script="background_generator", arguments=("fixed",)),
    case(
        "healthy_threads_of_environment", script="threads_beyond_cores", arguments=("environment",),
        variables={"OMP_NUM_THREADS": "16"},
    ),
)  # fmt: skip
"""Scripts of which nothing may be said. OMP_NUM_THREADS is no order: MKL takes fewer threads. With 16 on two cores the
pace was 0.96 of that with 2; after ``torch.set_num_threads(32)`` it is 0.17 of it."""

ALL: Final = (*REPORTED, *ALIKE, *CONTROLS)
