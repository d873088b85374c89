"""Cases with sources that ``telemetry.watch`` watches."""

from __future__ import annotations

import collections.abc
import copy
import io
import itertools
import pickle

import numpy as np
import torch

import telemetry
from tests.loaders.observe import EPOCHS, raised
from tests.loaders.unusual_loaders import (
    AnyAttribute,
    LikeALoader,
    Measured,
    OldStyle,
    RaisingAttribute,
    Reiterable,
    Resetting,
    Untrue,
)

ABSTRACT = (collections.abc.Sized, collections.abc.Iterator, collections.abc.Sequence, collections.abc.Hashable)
SPECIAL = ("__len__", "__getitem__", "__next__", "__contains__", "__reversed__", "__bool__", "__call__", "__hash__")


def everything(make) -> dict:
    """Operations on a source that was handed to ``watch``."""
    watched = telemetry.watch(make())
    kind = type(make())
    return {
        "kind": [isinstance(watched, kind), watched.__class__ is kind, *(isinstance(watched, a) for a in ABSTRACT)],
        "special": [getattr(watched, name, None) is not None for name in SPECIAL],
        "first": raised(lambda: list(telemetry.watch(make()))),
        "epochs": raised(lambda: [list(watched) for _ in range(3)]),
        "next": raised(lambda: next(telemetry.watch(make()))),
        "mid": raised(lambda: [list(itertools.islice(watched, 2)), list(watched)]),
        "iter": raised(lambda: iter(watched) is watched),
        "len": raised(lambda: len(watched)),
        "index": raised(lambda: watched[1]),
        "slice": raised(lambda: watched[:2]),
        "in": raised(lambda: 2 in telemetry.watch(make())),
        "bool": raised(lambda: bool(watched)),
        "reversed": raised(lambda: list(reversed(watched))),
        "equal": raised(lambda: [watched == watched, watched == telemetry.watch(make()), watched != make()]),
        "hash": raised(lambda: isinstance(hash(watched), int)),
        "pickled": raised(lambda: [type(p := pickle.loads(pickle.dumps(watched))).__name__, list(p)]),
        "copied": raised(lambda: [isinstance(c := copy.copy(watched), kind), list(c)]),
        "deep": raised(lambda: [isinstance(c := copy.deepcopy(watched), kind), list(c)]),
        "attribute": raised(lambda: watched.nothing_of_the_kind) if kind is not AnyAttribute else None,
        "call": raised(lambda: watched()),
        "dir": sorted(dir(watched)) == sorted(dir(make())),
    }


def a_list():
    watched = telemetry.watch([1, 2, 3])
    watched.append(4)
    watched[0] = 9
    del watched[1]
    watched += [5]
    return (
        everything(lambda: [1, 2, 3]),
        list(watched),
        watched + [6],
        watched == [9, 3, 4, 5],
        sorted(watched),
        repr(watched),
        f"{watched}",
        watched > [1],
        watched * 2,
    )


def other_containers():
    return [everything(make) for make in (lambda: (1, 2, 3), lambda: {1: 2, 2: 3}, lambda: range(3), lambda: "abc")]


def arrays():
    same = telemetry.watch(np.arange(3.0))
    whole = same
    whole += 1
    total = np.zeros(3)
    total += same
    return [
        *([type(each).__name__, each.tolist()] for each in (same + np.ones(3), total)),
        [whole is same, whole.tolist()],
        raised(lambda: np.mean(same)),
        raised(lambda: np.concatenate([same, np.ones(3)])),
    ]


def tensors():
    same = telemetry.watch(torch.arange(3.0))
    whole = same
    whole += 1
    return [
        (same + torch.ones(3)).tolist(),
        [whole is same, whole.tolist(), same.sum().item(), same[1].item()],
        raised(lambda: torch.save(same, io.BytesIO())),
    ]


def resetting():
    watched = telemetry.watch(Resetting())
    return everything(Resetting), [list(watched) for _ in range(EPOCHS)] == [[1, 2, 3]] * EPOCHS


def measured():
    return everything(Measured), everything(Untrue)


def reiterable():
    return everything(Reiterable), everything(OldStyle)


def like_a_loader():
    seen = [everything(LikeALoader), everything(AnyAttribute), everything(RaisingAttribute)]
    for kind in (LikeALoader, AnyAttribute, RaisingAttribute):
        watched = telemetry.watch(kind(range(50)))
        seen.append([list(watched) for _ in range(6)] == [list(range(50))] * 6)
    return seen


def attributes():
    source = Resetting()
    watched = telemetry.watch(source)
    watched.extra = 5
    seen = [source.extra, watched.extra, vars(watched) == vars(source), watched.items is source.items]
    del watched.extra
    return [*seen, hasattr(source, "extra"), raised(lambda: delattr(watched, "extra"))]


def generators():
    def counting():
        got = []
        try:
            for number in itertools.count():
                try:
                    got.append((yield number))
                except KeyError:
                    got.append("caught")
                if number == 4:
                    return got
        finally:
            closed.append(True)

    closed: list = []
    first, second, third = (telemetry.watch(counting()) for _ in range(3))
    seen = [next(first), first.send("a"), first.throw(KeyError("b")), list(first)]
    return [
        *seen,
        raised(lambda: next(first)),
        [next(second), second.close(), raised(lambda: next(second)), list(closed)],
        raised(lambda: third.throw(ValueError("mine"))),
        everything(lambda: (x for x in (1, 2, 3))),
        [x for x, _ in zip(telemetry.watch(counting()), range(2))],
        type(telemetry.watch(counting())).__name__,
    ]


def raising():
    class Failing:
        def __iter__(self):
            yield 1
            raise KeyError("in the source")

    class Refusing:
        def __iter__(self):
            raise OSError("cannot begin")

        def __len__(self):
            raise RuntimeError("cannot count")

        def __bool__(self):
            raise ArithmeticError("neither")

    refusing = telemetry.watch(Refusing())
    return [
        raised(lambda: list(telemetry.watch(Failing()))),
        raised(lambda: iter(refusing)),
        raised(lambda: len(refusing)),
        raised(lambda: bool(refusing)),
        raised(lambda: telemetry.watch(None)),
    ]


CASES = {
    case.__name__: case
    for case in (
        a_list,
        other_containers,
        arrays,
        tensors,
        resetting,
        measured,
        reiterable,
        like_a_loader,
        attributes,
        generators,
        raising,
    )
}
