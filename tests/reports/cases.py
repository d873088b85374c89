"""The scripts' truth: which cause, line and advice are right, and which advice would do harm.

Of advice a regular expression must match its setting and action (``num_workers: use more workers``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
MARK: Final = "# <- slow"

PUBLIC: Final = re.compile(r"[\w.-]+/[\w.-]+#\d+")


@dataclass(frozen=True, slots=True)
class Case:
    """One script with one environment.

    Attributes:
        name: a unique name; that of the script without ``script``.
        found: the causes of stalls or kinds of findings of which one must be named first. Empty for a control, of
            which nothing may be said.
        advice: the right first advice. Empty: any, or none, but no harmful one.
        harmful: advice that must not be given at all.
        line: whether the marked line of the script must be named.
        end: how the run ends, if that is its fault. Then the verdict must match ``end_said`` instead of naming one of
            ``found``, and have the advice and the line.
        variant: the variant that is judged. The speed-up is that of ``fixed``, or of the advised number of workers.
        environment: further variables.
        shared_memory: the size of /dev/shm.
        needs: a package that the script imports.
        seconds: length of the run.
    """

    name: str
    found: tuple[str, ...] = ()
    advice: str = ""
    harmful: str = ""
    line: bool = False
    end: str = ""
    end_said: str = ""
    script: str = ""
    variant: str = "base"
    environment: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str = ""
    needs: str = ""
    seconds: float = 45.0

    @property
    def path(self) -> Path:
        """The script."""
        return SCRIPTS / f"{self.script or self.name}.py"

    @property
    def healthy(self) -> bool:
        """Whether nothing may be said of it."""
        return not self.found and not self.end

    @property
    def truth(self) -> str:
        """What is true of it, for a table."""
        return " or ".join(self.found) or self.end or "healthy"

    @property
    def public(self) -> tuple[str, ...]:
        """The public reports that the script's first line names."""
        return tuple(PUBLIC.findall(self.path.read_text(encoding="utf-8").splitlines()[0]))

    @property
    def lines(self) -> frozenset[int]:
        """The numbers of the marked lines."""
        text = self.path.read_text(encoding="utf-8").splitlines()
        return frozenset(number for number, line in enumerate(text, 1) if line.endswith(MARK))


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

REPORTED: Final = (
    Case(
        "unsplit_stream", ("loader_on_training_thread", "duplicate_samples"), _SPLIT, _WORKERS_ALONE, line=True
    ),
    Case("iterator_each_step", ("iterator_per_step",), _ONE_ITERATOR, "^(num_workers|prefetch_factor)", line=True),
    Case("rows_one_by_one", ("loader_on_training_thread",), _BATCHED, "^num_workers|smaller size", line=True),
    Case("one_shard", ("empty_workers",), r"shard|files|num_workers=1", "faster storage|^num_workers.*more", line=True),
    Case("collect_each_step", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    Case("metrics_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    Case("shuffle_buffer", ("worker_startup", "workers_io_bound"), _FIRST_FETCH, "^persistent_workers", line=True),
    Case("threads_beyond_cores", ("threads_oversubscribed",), _FEWER_THREADS, "^num_workers"),
    Case("histograms_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True, needs="tensorboard"),
    Case("kept_graph", ("step_growth",), _GROWTH, "^num_workers", line=True),
    Case("validation_without_workers", ("evaluation_loader",), _VALIDATION, line=True),
    Case("lock_at_fork", harmful="^num_workers", line=True, end=_NO_BATCH, end_said=_NO_BATCH_SAID),
    Case(
        "small_shared_memory", advice=_LARGER, line=True, end="full /dev/shm", end_said=_SHARED_MEMORY,
        shared_memory="60m",
    ),
    Case("background_reader", ("reader_thread",), _READ, "background thread|ahead", line=True),
    Case("whole_file_in_each_worker", ("duplicate_samples",), _SPLIT, _WORKERS_ALONE, line=True),
    Case("collect_in_collate", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    Case("validation_one_by_one", ("evaluation_loader",), r"batch_size|larger batch|evaluation", line=True),
    Case("threads_in_workers", ("threads_oversubscribed",), _FEWER_THREADS, "^num_workers.*more"),
)  # fmt: skip
"""The scripts after public reports."""

ALIKE: Final = (
    Case(
        "unsplit_stream_in_workers", ("duplicate_samples",), _SPLIT, _WORKERS_ALONE, line=True,
        script="unsplit_stream", environment={"WORKERS": "3"},
    ),
    Case("batch_from_helper", ("iterator_per_step",), _ONE_ITERATOR, "^(num_workers|prefetch_factor)", line=True),
    Case("table_one_by_one", ("loader_on_training_thread",), _BATCHED, "^num_workers|smaller size", line=True),
    Case("two_files", ("empty_workers",), r"shard|files|num_workers=2", "faster storage", line=True),
    Case("collect_in_callback", ("own_gc_collect", "gc_pause"), _NO_COLLECT, "^num_workers", line=True),
    Case(
        "collect_in_worker", ("own_gc_collect", "workers_cpu_bound"), rf"{_NO_COLLECT}|take .* out of the loader",
        line=True,
        script="collect_in_collate", environment={"WORKERS": "1"},
    ),
    Case("json_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    Case("tokenising_thread", ("gil_held",), _OTHER_PROCESS, "^(num_workers|pin_memory)", line=True),
    Case("index_each_epoch", ("worker_startup", "workers_io_bound"), _FIRST_FETCH, "^persistent_workers", line=True),
    Case("weights_each_step", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    Case("metric_by_items", ("host_work",), _LOG_LESS, "^num_workers", line=True),
    Case("kept_state", ("step_growth",), _GROWTH, "^num_workers", line=True),
    Case("walked_history", ("step_growth",), _GROWTH, "^num_workers", line=True),
    Case("validation_loader_made_anew", ("evaluation_loader",), r"persistent_workers|once|keep|workers", line=False),
    Case("answer_never_comes", harmful="^num_workers", line=True, end=_NO_BATCH, end_said=_NO_BATCH_SAID),
    Case(
        "shared_memory_of_prefetching", advice=_LARGER, line=True, end="full /dev/shm", end_said=_SHARED_MEMORY,
        shared_memory="60m",
    ),
    Case("background_generator", ("reader_thread",), _READ, line=True),
    Case("short_epochs", ("worker_startup",), "^persistent_workers"),
    Case("many_small_tensors", ("batch_transfer",), r"fewer|few large|one (large )?tensor|stack"),
)  # fmt: skip
"""Others of the same kinds."""

CONTROLS: Final = (
    *(Case(path.stem) for path in sorted(SCRIPTS.glob("healthy_*.py"))),
    Case("healthy_reader", script="background_generator", variant="fixed"),
    Case(
        "healthy_threads_of_environment", script="threads_beyond_cores", variant="environment",
        environment={"OMP_NUM_THREADS": "16"},
    ),
)  # fmt: skip
"""Scripts of which nothing may be said. OMP_NUM_THREADS is no order: MKL takes fewer threads. With 16 on two cores the
pace was 0.96 of that with 2; after ``torch.set_num_threads(32)`` it is 0.17 of it."""

ALL: Final = (*REPORTED, *ALIKE, *CONTROLS)
