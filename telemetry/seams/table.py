"""Every name of torch, of other libraries and of Python that the agent patches, or that is private and read.

``telemetry doctor`` tells which of them the installed versions do not have. `tests/test_architecture.py` finds a
private name that is missing here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Seam(NamedTuple):
    """Names that the agent touches for one purpose.

    Attributes:
        module: the module in which the names are.
        names: those that are patched or read. A dot leads into a class.
        why: what they tell.
        without: what is absent if a version does not have them.
        patched: whether something of ours stands in their place while the agent runs.
        since: the first version of the library that has them all; empty if every supported one does.
        looked_up: whether the names can be looked up in the module. Others are attributes of objects, or only some
            builds have them.
    """

    module: str
    names: tuple[str, ...]
    why: str
    without: str
    patched: bool = False
    since: str = ""
    looked_up: bool = True


_LOADER: Final = "torch.utils.data.dataloader"
_ITERATOR: Final = "_MultiProcessingDataLoaderIter"
_STATEFUL: Final = "_StatefulMultiProcessingDataLoaderIter"

SEAMS: Final = (
    # -- the loop ------------------------------------------------------------------------------------------------------
    Seam(
        _LOADER,
        ("_BaseDataLoaderIter.__next__",),
        "each wait for a batch",
        "waits: only the steps of optimizers count",
        patched=True,
    ),
    Seam(_LOADER, ("DataLoader.__iter__",), "the start of an epoch", "waits at epoch boundaries", patched=True),
    Seam(
        _LOADER,
        (f"{_ITERATOR}.__init__", f"{_ITERATOR}._reset", f"{_ITERATOR}._shutdown_workers"),
        "workers start, begin anew and end",
        "fetches of workers, and their start",
        patched=True,
    ),
    Seam(
        "torch.utils.data._utils.worker",
        ("_worker_loop",),
        "a worker counts its fetches",
        "fetches of workers: the cause of most waits is `unknown` then",
        patched=True,
    ),
    Seam(
        "torch.utils.data._utils.fetch",
        ("_MapDatasetFetcher.fetch", "_IterableDatasetFetcher.fetch"),
        "the start and the end of a fetch, only in workers",
        "fetches of workers",
        patched=True,
    ),
    Seam(
        _LOADER,
        (
            *("_workers", "_num_workers", "_prefetch_factor", "_persistent_workers", "_pin_memory", "_dataset"),
            *(
                "_index_sampler",
                "_auto_collation",
                "_collate_fn",
                "_num_yielded",
                "_in_order",
                "_rcvd_idx",
                "_shutdown",
            ),
            "_popen",
        ),
        "the settings of a loader, its workers, and how far it is",
        "advice that names a setting",
        since="torch 2.6 (`_in_order`)",
        looked_up=False,
    ),
    Seam(
        _LOADER,
        ("_sampler_iter", "_num_samples"),
        "the indices that are left to draw, in the generator of torch's `BatchSampler`, at the first batch of an epoch",
        "samples of a smaller last batch without workers, which counts as a whole one",
        looked_up=False,
    ),
    Seam(
        "torchdata.stateful_dataloader.stateful_dataloader",
        (
            *("StatefulDataLoader.__iter__", "_worker_loop", f"{_STATEFUL}.__init__", f"{_STATEFUL}._reset"),
            f"{_STATEFUL}._shutdown_workers",
        ),
        "the same of torchdata's loader",
        "waits for its batches",
        patched=True,
    ),
    Seam(
        "accelerate.data_loader",
        (),
        "a frame of this module begins the iteration: its loaders request each batch before the one before is used",
        "exact counts of steps and samples where a loop is left early, and the last step of an epoch",
    ),
    Seam("torchdata.nodes.base_node", ("BaseNode.__next__",), "waits for a node", "waits for nodes", patched=True),
    Seam(
        "torchdata.nodes.loader",
        ("Loader.__iter__",),
        "the start of an epoch of nodes",
        "waits for nodes",
        patched=True,
    ),
    Seam(
        "monai.data.thread_buffer",
        ("ThreadDataLoader.__iter__", "ThreadBuffer.__iter__"),
        "waits for MONAI's thread",
        "waits for it",
        patched=True,
    ),
    Seam(
        "nvidia.dali.plugin.pytorch",
        (
            *("DALIGenericIterator.__init__", "DALIGenericIterator.__next__"),
            *("DALIRaggedIterator.__init__", "DALIRaggedIterator.__next__"),
        ),
        "waits for NVIDIA DALI",
        "waits for it",
        patched=True,
    ),
    # -- optimizers and checkpoints ------------------------------------------------------------------------------------
    Seam(
        "torch.optim.optimizer",
        ("register_optimizer_step_post_hook", "_global_optimizer_post_hooks"),
        "each step of an optimizer tells training from evaluation. The hook stays, and does nothing after `stop`",
        "evaluations, which count as training",
        patched=True,
    ),
    Seam(
        "fastai.optimizer",
        ("Optimizer.step",),
        "each step of fastai's own optimizer, which is none of torch's: 0.5 us in the step of a Learner",
        "steps of its optimizers, and evaluations that only they tell from training",
        patched=True,
    ),
    Seam(
        "torch.optim.optimizer", ("Optimizer.load_state_dict",), "the step of a resumed run", "that step", patched=True
    ),
    Seam("torch", ("save", "load"), "checkpoints", "checkpoints, which count as `other`", patched=True),
    Seam("torch.serialization", ("save", "load"), "checkpoints", "checkpoints, which count as `other`", patched=True),
    Seam(
        "torch.distributed.checkpoint",
        ("save", "async_save", "load"),
        "checkpoints",
        "checkpoints, which count as `other`",
        patched=True,
    ),
    Seam(
        "torch.distributed.checkpoint.state_dict_saver",
        ("save", "async_save"),
        "checkpoints",
        "checkpoints, which count as `other`",
        patched=True,
    ),
    Seam(
        "torch.distributed.checkpoint.state_dict_loader",
        ("load", "load_state_dict"),
        "checkpoints",
        "checkpoints, which count as `other`",
        patched=True,
    ),
    Seam(
        "torch.distributed.checkpoint.state_dict",
        ("_init_optim_state",),
        "a step that only creates an optimizer's state does not count",
        "nothing: there is one step too many",
        patched=True,
    ),
    Seam(
        "safetensors.torch",
        ("save_file", "save_model", "load_file", "load_model"),
        "checkpoints",
        "checkpoints, which count as `other`",
        patched=True,
    ),
    # -- devices -------------------------------------------------------------------------------------------------------
    Seam(
        "torch.cuda.graphs",
        ("CUDAGraph.capture_begin", "CUDAGraph.capture_end", "CUDAGraph.replay"),
        "a step of an optimizer in a CUDA graph, and no event of ours in a capture",
        "steps that a graph replays",
        patched=True,
    ),
    Seam(
        "torch.accelerator.graphs",
        ("Graph.capture_begin", "Graph.capture_end", "Graph.replay"),
        "the same on any device",
        "steps that a graph replays",
        patched=True,
    ),
    Seam(
        "torch._C",
        ("_cuda_hasPrimaryContext",),
        "whether CUDA may be asked without starting it",
        "exposed wait on a GPU",
        looked_up=False,
    ),
    Seam("torch._C", ("_get_privateuse1_backend_name",), "the name of another device", "its exposed wait"),
    Seam("torch_xla", ("_XLAC._xla_runtime_is_initialized",), "whether XLA is in use", "that it is", looked_up=False),
    Seam("torch._C", ("_current_graph_task_id",), "whether a thread is autograd's", "steps in a backward pass"),
    Seam("torch._C", ("DisableTorchFunction",), "no mode of the script sees what the agent reads", "devices"),
    Seam(
        "torch._C",
        ("_cuda_attach_out_of_memory_observer",),
        "an allocation that fails",
        "the record of an out-of-memory error",
        looked_up=False,
    ),
    Seam("torch._C", ("_cuda_memoryStats",), "what CUDA's allocator has in use", "memory of CUDA", looked_up=False),
    Seam("torch.cuda.memory", ("_dump_snapshot",), "the same, as a file for torch's viewer", "that file"),
    Seam(
        "torch._C._distributed_c10d",
        ("_dump_nccl_trace_json", "_dump_fr_trace_json"),
        "the collective in which a rank hangs",
        "its name in the verdict on a hang",
        since="torch 2.7 (`_dump_fr_trace_json`)",
        looked_up=False,
    ),
    Seam(
        "torch.distributed",
        ("_get_sequence_number_for_group",),
        "how many collectives a rank has begun",
        "their number in the verdict on a hang",
        looked_up=False,
    ),
    # -- torch.compile and profilers -----------------------------------------------------------------------------------
    Seam("torch._dynamo.trace_rules", ("add",), "Dynamo calls our functions, and does not trace them", "speed"),
    Seam("torch._dynamo.utils", ("get_compilation_metrics",), "what is compiled again, and why", "`recompiling`"),
    Seam(
        "torch.autograd.profiler",
        (
            *("profile._prepare_trace", "profile._start_trace", "profile.__exit__"),
            *("emit_nvtx.__enter__", "emit_nvtx.__exit__", "emit_itt.__enter__", "emit_itt.__exit__"),
        ),
        "a profiler of the user's begins: ours ends first, because two end the process",
        "snapshots",
        patched=True,
    ),
    Seam("torch.autograd.profiler", ("_is_profiler_enabled",), "a profiler was left on", "`debug_switch`"),
    Seam(
        "torch._C._autograd",
        (
            *("_profiler_enabled", "_enable_record_function", "_add_metadata_json", "_disable_profiler_legacy"),
            "_ProfilerDisableOptions",
        ),
        "a snapshot begins and ends, and says what it is of",
        "snapshots",
    ),
    Seam(
        "torch.profiler.profiler",
        ("_KinetoProfile._get_distributed_info",),
        "a trace says which rank it is of",
        "the rank in a trace",
    ),
    Seam(
        "torch._C",
        ("_ZN9libkineto6Logger14severityLevel_E",),
        "Kineto writes nothing to stderr during a snapshot",
        "quiet snapshots",
        looked_up=False,
    ),
    # -- Python and others ---------------------------------------------------------------------------------------------
    Seam("gc", ("callbacks",), "each garbage collection of the training thread", "`gc_pause`", patched=True),
    Seam("sys", ("setswitchinterval", "_current_frames", "_getframe"), "stack samples", "lines and parts"),
    Seam("threading", ("_active",), "the threads that Python lists, without their lock", "stacks of threads"),
    Seam("multiprocessing.process", ("_children",), "children that outlive the script", "an end line after theirs"),
    Seam(
        "multiprocessing.process",
        ("_inheriting",),
        "whether a spawned process still imports the script",
        "nothing: no agent starts there",
        looked_up=False,
    ),
    Seam(
        "multiprocessing.process",
        ("_target", "_args"),
        "the rank of a process that `torch.multiprocessing.spawn` starts",
        "its rank until `RANK` is set",
        looked_up=False,
    ),
    Seam(
        "importlib.machinery",
        ("_initializing",),
        "whether a module is imported completely",
        "nothing: it is patched at once",
        looked_up=False,
    ),
    Seam(
        "sys", ("_is_gil_enabled",), "whether the GIL is off", "nothing: it is on", since="Python 3.13", looked_up=False
    ),
    Seam("mlflow.tracking.fluent", ("_get_latest_active_run",), "the run that is active", "figures in MLflow"),
)


def absent() -> Iterator[Seam]:
    """The seams in imported modules whose names the installed versions do not have, with these names only."""
    for seam in SEAMS:
        module = sys.modules.get(seam.module)
        if module is None or not seam.looked_up:
            continue
        names = tuple(name for name in seam.names if not _has(module, name))
        if names:
            yield seam._replace(names=names)


def _has(module: object, name: str) -> bool:
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
