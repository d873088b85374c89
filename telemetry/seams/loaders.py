"""Recognises loaders, and registers the iterators that give batches, without keeping them alive."""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections import deque
from operator import length_hint
from types import CodeType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from telemetry.model.records import LoaderSettings, LoaderTraits
from telemetry.seams.patching import WeakMap
from telemetry.seams.worker_block import EPOCHS
from telemetry.util.stacks import is_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from telemetry.seams.worker_block import WorkerBlock


# -- recognises an object by its type only, because its attributes prove nothing and reading one may raise -------------


class Arrival(NamedTuple):
    """A batch that the training thread has taken from its workers. A tuple, because each batch makes one.

    Attributes:
        epoch: the epoch of the loader's iterator, from 1 on.
        number: the batch's number in the epoch, from 0 on.
        requested_ns, arrived_ns: start and end of the wait, monotonic.
    """

    epoch: int
    number: int
    requested_ns: int
    arrived_ns: int


class Wrapper:
    """A wrapper around a watched object (``_telemetry_object``), or around an iterator of ``_telemetry_source``.

    ``_telemetry_batches`` is the source of its batches.
    """

    __slots__ = ("__weakref__", "_telemetry_batches", "_telemetry_object", "_telemetry_source")

    _telemetry_batches: BatchSource
    _telemetry_object: Any
    _telemetry_source: Any


def origin(candidate: object) -> weakref.ref[Any] | None:
    """A weak reference to the object inside a wrapper, or inside the wrapper that this one iterates; else None."""
    if not issubclass(type(candidate), Wrapper):
        return None
    wrapper: Any = candidate
    if wrapper._telemetry_source is not None:
        wrapper = wrapper._telemetry_source
    try:
        return weakref.ref(wrapper._telemetry_object)
    except TypeError:  # some objects, such as a list, do not support weak references
        return weakref.ref(wrapper)


def unwrapped(candidate: Any) -> Any:
    """The object inside a wrapper; anything else unchanged."""
    return candidate._telemetry_object if issubclass(type(candidate), Wrapper) else candidate


def is_loader(candidate: object) -> bool:
    """Whether an object is a ``DataLoader`` of torch or of a subclass."""
    return _is_a(candidate, "DataLoader")


def is_loader_iterator(candidate: object) -> bool:
    """Whether an object is an iterator of a ``DataLoader``, including torchdata's."""
    return _is_a(candidate, "_BaseDataLoaderIter")


def is_tensor(candidate: object) -> bool:
    """Whether an object is a tensor. `torch.utils.swap_tensors` refuses one that has a weak reference."""
    return _is_a(candidate, "Tensor", "torch")


def own_value(candidate: Any, name: str, default: Any = None) -> Any:
    """An attribute that no code of the object's class computes. Unlike ``vars``, this does not make it a dictionary.

    With a dictionary, Python takes longer for each attribute of the object: 0.15 us more for torch's own part of
    ``next()`` (`benchmarks/`, hot; Python 3.11).
    """
    kind = type(candidate)
    names = _class_names.get(kind)
    if names is None:
        names = _class_names[kind] = frozenset(name for base in kind.__mro__ for name in vars(base))
    try:
        if name in names:
            return vars(candidate).get(name, default)  # a property, or a default of the class
        return object.__getattribute__(candidate, name)  # not the class's own
    except (AttributeError, TypeError):
        return default


_class_names: Final[WeakMap[frozenset[str]]] = WeakMap()
"""The names of all that classes have. A script may make an iterator in each step, and it takes 1 us to ask a class."""


def workers_of(candidate: Any) -> list[Any]:
    """The workers of a ``DataLoader``'s iterator, processes or threads; empty for anything else."""
    workers = own_value(candidate, "_workers") if is_loader_iterator(candidate) else None
    return workers if isinstance(workers, list) else []


def batch_size_of(candidate: Any) -> int | None:
    """The batch size of a ``DataLoader``'s iterator; None if code that is not torch's makes its batches."""
    sampler = own_value(candidate, "_index_sampler") if is_loader_iterator(candidate) else None
    if not _is_a(sampler, "BatchSampler", "torch.utils.data.sampler"):
        return None
    by_torch = getattr(_of_class(type(sampler), "__iter__"), "__module__", None) == "torch.utils.data.sampler"
    size = vars(sampler).get("batch_size") if by_torch else None
    return size if isinstance(size, int) else None


def samples_left(candidate: Any) -> int | None:
    """How many samples a ``DataLoader``'s iterator without workers has still to give, with its newest batch.

    The generators of torch's samplers know it. None if another one draws the indices.
    """
    names = _locals_of(own_value(candidate, "_sampler_iter"))
    if names is not None and type(names.get("batch")) is list:
        drawn, indices = len(names["batch"]), names.get("sampler_iter")
        while (names := _locals_of(indices)) is not None:
            again = own_value(names.get("self"), "replacement") or own_value(names.get("self"), "_num_samples")
            indices = None if again else getattr(indices, "gi_yieldfrom", None)
        ended = type(indices) is GeneratorType and indices.gi_frame is None
        if ended or type(indices) in _EXACT:
            return drawn + length_hint(indices)
    return None


_EXACT: Final[tuple[type, ...]] = (type(iter([])), type(iter(())), type(iter(range(0))))
_SAMPLERS: Final = ("torch.utils.data.sampler", "accelerate.data_loader")


def _locals_of(generator: Any) -> dict[str, Any] | None:
    """The local variables of a generator of a known sampler, which is suspended."""
    frame = generator.gi_frame if type(generator) is GeneratorType else None
    known = frame is not None and frame.f_globals.get("__name__") in _SAMPLERS
    return frame.f_locals if frame is not None and known else None


def traits_of(iterator: Any) -> LoaderTraits:
    """What the data set and the sampler of a ``DataLoader``'s iterator show. None of their code is run."""
    if not is_loader_iterator(iterator):
        return LoaderTraits()
    dataset = own_value(iterator, "_dataset")
    while type(dataset) is getattr(sys.modules.get("torch.utils.data.dataset"), "Subset", None):
        dataset = vars(dataset).get("dataset")
    kind, sampler = type(dataset), own_value(iterator, "_index_sampler")
    known = _known_classes.get(kind)
    if known is None:
        known = _known_classes[kind] = _traits_of_class(kind)
    if _is_a(sampler, "BatchSampler", "torch.utils.data.sampler"):
        sampler = vars(sampler).get("sampler")
    return structs.replace(
        known,
        shuffled=None if known.iterable_data else is_random(sampler),
        one_by_one=known.one_by_one and own_value(iterator, "_auto_collation") is True,
        batch_size=batch_size_of(iterator),
        own_collate=getattr(own_value(iterator, "_collate_fn"), "__module__", None) != _COLLATE,
    )


_COLLATE: Final = "torch.utils.data._utils.collate"

_known_classes: WeakMap[LoaderTraits] = WeakMap()
"""What classes of data sets show. It takes 0.4 ms to read, and a script may make an iterator in each step."""


def _traits_of_class(kind: type) -> LoaderTraits:
    base = getattr(sys.modules.get("torch.utils.data.dataset"), "IterableDataset", None)
    iterable = isinstance(base, type) and issubclass(kind, base)
    return LoaderTraits(
        iterable_data=iterable,
        asks_for_its_worker=asks_for_its_worker(kind) if iterable else None,
        has_set_epoch=callable(_of_class(kind, "set_epoch")),
        one_by_one=not iterable and _of_class(kind, "__getitems__") is None,
        sample_code=_sample_code(_of_class(kind, "__iter__" if iterable else "__getitem__")),
    )


def is_random(sampler: object) -> bool:
    """Whether a sampler draws in random order. One of the user's own may have a reason for its order."""
    name = type(sampler).__name__
    return "Random" in name or (name == "DistributedSampler" and bool(own_value(sampler, "shuffle", False)))


def asks_for_its_worker(kind: type) -> bool:
    """Whether a data set may divide its items among the workers: one of its functions uses `get_worker_info`."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return any("get_worker_info" in names for value in values for names in _names(getattr(value, "__code__", None)))


def _names(code: object) -> Iterator[tuple[str, ...]]:
    if isinstance(code, CodeType):
        yield code.co_names
        for constant in code.co_consts:
            yield from _names(constant)


def _of_class(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _sample_code(function: Any) -> tuple[str, int, str] | None:
    """File, line and name of the user's function that gives a sample: the line that yields it, or that returns it."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or is_library(code.co_filename):
        return None
    begins, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    lines = {"YIELD_VALUE": 0, "RETURN_VALUE": 0}
    for instruction in dis.get_instructions(code):
        line = begins.get(instruction.offset) or line
        if instruction.opname in lines:
            lines[instruction.opname] = line
    return code.co_filename, lines["YIELD_VALUE"] or lines["RETURN_VALUE"] or line, code.co_name


def _is_a(candidate: object, name: str, module: str = "torch.utils.data.dataloader") -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and issubclass(type(candidate), kind)


# -- describes where batches come from, without keeping the iterator alive ---------------------------------------------

_MAX_ARRIVALS: Final = 512
"""So many arrivals are kept between two readings. In a faster loop only the newest are used."""


class BatchSource:
    """Where batches come from.

    Attributes:
        kind: ``training_thread``, ``workers``, ``watched`` or ``read_ahead``.
        settings: the loader's settings, by the names of DataLoader's arguments. Also ``loader_used_again`` (whether the
            newest iteration was not its first) and, if workers are forked, ``sharing_strategy`` of
            torch.multiprocessing.
    """

    def __init__(self, kind: str, settings: LoaderSettings) -> None:
        self.kind = kind
        self.settings = settings


ON_THREAD: Final = BatchSource("training_thread", {"num_workers": 0})
WATCHED: Final = BatchSource("watched", {})
READ_AHEAD: Final = BatchSource("read_ahead", {})


class LoaderHandle(BatchSource):
    """An iterator with workers. The last four attributes are the agent thread's.

    Attributes:
        pids: the pids of its workers, 0 for a worker that is a thread of this process.
        threads: how many workers are threads of this process.
        block: counters that the workers write; None if they started before the agent, or are threads.
        training: whether it has given a training batch.
        resumed: whether its first iteration began in the middle. Then its batches cannot be matched with fetches.
        in_order: whether batch ``n`` of an epoch comes from worker ``n % len(pids)``.
        epoch: the number of the iteration whose batches come, as its workers count them; 0 if they do not.
        delivered: how many batches of that iteration were taken; None if that is unknown.
        arrivals: training batches taken since the last reading.
        traits: what its data set and its sampler show.
        retired: whether the iterator is gone.
    """

    def __init__(self, iterator: Any, block: WorkerBlock | None, *, again: bool = True) -> None:
        threads = [isinstance(worker, threading.Thread) for worker in iterator._workers]
        self.threads = sum(threads)
        self.pids = tuple(0 if one else worker.pid for one, worker in zip(threads, iterator._workers, strict=True))
        self.block = block if not self.threads else None
        self.training = False
        self.resumed = own_value(iterator, "_num_yielded", 0) > 0  # torchdata's StatefulDataLoader restores a state
        self.in_order = bool(own_value(iterator, "_in_order", True))
        self.epoch = 0
        self.delivered: int | None = 0
        self.arrivals: deque[Arrival] = deque(maxlen=_MAX_ARRIVALS)
        self.traits = traits_of(iterator)
        self.retired = False
        settings: LoaderSettings = {
            "num_workers": len(self.pids),
            "prefetch_factor": own_value(iterator, "_prefetch_factor"),
            "persistent_workers": bool(own_value(iterator, "_persistent_workers", False)),
            "pin_memory": bool(own_value(iterator, "_pin_memory", False)),
            "loader_used_again": again,
        }
        if own_value(iterator, "_in_order") is not None:  # from torch 2.6 on
            settings["in_order"] = self.in_order
        multiprocessing = sys.modules.get("torch.multiprocessing")
        if multiprocessing is not None and all(map(_is_forked, iterator._workers)):  # others do not inherit it
            settings["sharing_strategy"] = multiprocessing.get_sharing_strategy()
        super().__init__("workers", settings)

    def samples(self) -> tuple[int, int]:
        """Samples of the batches that its workers have made in the iteration that goes on, and those batches.

        Both are 0 if they are not known.
        """
        counters = self.block.read() if self.block is not None else ()
        if any(each.unsized or self.epoch <= each.epoch - EPOCHS for each in counters):
            return 0, 0
        kept = [each for each in counters if self.epoch <= each.epoch]
        place = self.epoch % EPOCHS
        return sum(each.epoch_samples[place] for each in kept), sum(each.epoch_sized[place] for each in kept)


def _is_forked(worker: Any) -> bool:
    return getattr(getattr(worker, "_popen", None), "method", None) == "fork"


# -- registers iterators -----------------------------------------------------------------------------------------------

_MAX_ITERATORS: Final = 64


class LoaderRegistry:
    """The training thread writes it. The agent thread may use `live`, `take_retired` and `newest`.

    Attributes:
        newest: returns the source of the newest batches; None before the first batch, and if it is gone.
        newest_begun: returns the handle of the iteration that began last, on any thread; None if it has no workers.
        iterated_at: file, line and function of the user's code that has made the newest iterator.
        place: file and line of it, and the line that has called that function.
        read_ahead: whether accelerate iterates, which requests each batch before it gives the one before to the loop.
        own_traits: the traits of the newest loader without workers.
        batch_size: how many samples a batch of the newest loader has; None if unknown.
        known_iterators: iterator classes of other libraries, each with a function from an iterator to its source.
        sampling: the request to new workers: the session, and the stamp until which they sample their fetches. The
            agent thread writes it.
        asked: handles of the iterators that were registered with such a request. The agent thread takes them.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Any], LoaderHandle]] = {}
        self._gone: deque[weakref.KeyedRef[int, Any]] = deque()  # gets each iterator that is freed
        self._retired: deque[LoaderHandle] = deque(maxlen=_MAX_ITERATORS)
        self.newest: Callable[[], BatchSource | None] = lambda: None  # or a weak reference
        self.newest_begun: Callable[[], LoaderHandle | None] = lambda: None  # or a weak reference
        self.iterated_at: tuple[str, int, str] | None = None
        self.place = "", 0, 0
        self.read_ahead = False
        self.own_traits = LoaderTraits()
        self._own_id = 0
        self.batch_size: int | None = None
        self.known_iterators: list[tuple[type, Callable[[Any], BatchSource]]] = []
        self.sampling = (0, 0)
        self.asked: deque[LoaderHandle] = deque(maxlen=_MAX_ITERATORS)

    def register(
        self, iterator: object, block: WorkerBlock | None = None, *, again: bool = True
    ) -> LoaderHandle | None:
        """Register an iterator with workers, watched or not. Returns its handle; None for another one.

        It keeps no reference to the iterator. With a reference, the agent thread could become the thread that
        shuts the workers down. ``again``: whether its loader has made an iterator before.
        """
        iterator = unwrapped(iterator)
        known = self.known(iterator)
        if known is not None or len(self._live) >= _MAX_ITERATORS or not workers_of(iterator):
            return known
        key, handle = id(iterator), LoaderHandle(iterator, block, again=again)
        # The callback is C code: see `seams.patching.WeakMap`.
        self._live[key] = weakref.KeyedRef(iterator, self._gone.append, key), handle
        if block is not None and self.sampling[1]:
            self.asked.append(handle)
        return handle

    def begun(self, iterator: object) -> LoaderHandle | None:
        """Note that an iteration has begun, on any thread. Returns the handle of its iterator; None without workers."""
        handle = self.register(iterator)
        self._own_id = 0
        if handle is not None:
            self.newest_begun = weakref.ref(handle)
        return handle

    def note_caller(self, frame: FrameType | None) -> None:
        """Note the innermost line of the user's code that makes an iterator, and the library's that reads it ahead."""
        self.read_ahead = False
        while frame is not None and is_library(frame.f_code.co_filename):
            self.read_ahead = self.read_ahead or frame.f_globals.get("__name__") == "accelerate.data_loader"
            frame = frame.f_back
        self.place = "", 0, 0
        if frame is not None:
            self.iterated_at = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            caller = frame.f_back
            self.place = frame.f_code.co_filename, frame.f_lineno, 0 if caller is None else caller.f_lineno

    def known(self, iterator: object) -> LoaderHandle | None:
        """The handle of a live iterator with workers, watched or not; else None."""
        self._retire()
        entry = self._live.get(id(unwrapped(iterator)))
        return None if entry is None else entry[1]

    def delivered(self, iterator: object, *, training: bool) -> BatchSource:
        """Note a batch that came on the slow path. Returns its source. ``training``: whether it is for training."""
        source = self._of(iterator)
        if training:
            self.newest = weakref.ref(source)
            if isinstance(source, LoaderHandle):
                source.training = True
                self.batch_size = source.traits.batch_size
            elif source is not ON_THREAD:
                self.batch_size = None
            elif id(iterator) != self._own_id:
                self.own_traits, self._own_id = traits_of(unwrapped(iterator)), id(iterator)
                self.batch_size = self.own_traits.batch_size
        return source

    def live(self) -> list[LoaderHandle]:
        """Handles of the live iterators with workers."""
        self._retire()
        return [handle for _, handle in list(self._live.values())]

    def take_retired(self) -> Iterator[LoaderHandle]:
        """Handles of iterators that ended since the last call. Their counters must still be read."""
        self._retire()
        while self._retired:
            yield self._retired.popleft()

    def _retire(self) -> None:
        """Move iterators that were freed to the retired ones. Several threads may do this at once."""
        while self._gone:
            try:
                reference = self._gone.popleft()
            except IndexError:
                return
            entry = self._live.get(reference.key)
            if entry is not None and entry[0] is reference:
                del self._live[reference.key]
                entry[1].retired = True
                self._retired.append(entry[1])

    def _of(self, iterator: Any) -> BatchSource:
        wrapper, iterator = iterator, unwrapped(iterator)
        handle = self.register(iterator)  # it may have begun before the agent
        if handle is not None:
            return handle
        for kind, source_of in self.known_iterators:
            if issubclass(type(iterator), kind):
                return source_of(iterator)
        if not is_loader_iterator(iterator):
            return wrapper._telemetry_batches if issubclass(type(wrapper), Wrapper) else WATCHED
        workers = own_value(iterator, "_num_workers", 0)
        return BatchSource("workers", {"num_workers": workers}) if workers else ON_THREAD
