"""A module that is watched is patched when it is imported, whoever searches for it meanwhile."""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.abc import MetaPathFinder

import pytest

from telemetry.hooks.patching import ImportWatch

NAME = "a_module_that_is_watched"


class Slow(MetaPathFinder):
    """Holds the first search for the module up."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def find_spec(self, name, path, target=None):
        if name == NAME and not self.entered.is_set():
            self.entered.set()
            assert self.go.wait(60)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    errors: list = []
    watch = ImportWatch(errors.append)
    yield watch
    watch.close()
    sys.modules.pop(NAME, None)
    assert errors == []


def test_a_search_on_one_thread_hides_no_module_from_another(watch):
    seen: list = []
    watch.when_imported(NAME, seen.append)
    slow = Slow()
    sys.meta_path.insert(1, slow)
    found: dict[str, object] = {}

    def search(who: str) -> None:
        found[who] = watch.find_spec(NAME, None)

    threads = [threading.Thread(target=search, args=(who,)) for who in ("first", "second")]
    threads[0].start()
    assert slow.entered.wait(60)
    threads[1].start()
    threads[1].join(0.5)  # CPython lets it wait for the first
    slow.go.set()
    for thread in threads:
        thread.join(60)
    assert None not in found.values()
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [module]
