"""A script imports what it would import without the agent, and in the same way."""

from __future__ import annotations

import pytest

from tests.faults.processes import end_of, events
from tests.unnoticed.pairs import COMMAND, MODULE, unchanged

# -- a project has modules of its own under the names of those that the agent imports ----------------------------------

IMPORTS = """
    import os, sys
    from unnoticed.looks import looked_at
    modules = [__import__(name) for name in sys.argv[1:]]
    for _ in looked_at(2):
        pass
    print([(each.MINE, os.path.relpath(each.__file__)) for each in modules])
"""
HOW = {
    "python -m telemetry run script.py": {"under": MODULE},
    "telemetry run script.py": {"under": COMMAND},
    "telemetry run -m script": {"under": COMMAND, "module": True},
}


def messages(folder, *names: str, **how) -> set[str]:
    """Run a project with modules of these names. Returns what the agent logs of parts that do not work on this machine."""
    unchanged(folder, IMPORTS, *names, cold=True, beside={f"{name}.py": "MINE = 3\n" for name in names}, **how)
    assert end_of(folder / "ours-run")["errors_total"] == {}
    return {line["message"] for line in events(folder / "ours-run", "error")}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The messages of a project whose modules are nobody else's."""
    return messages(tmp_path_factory.mktemp("plain"), "config")


@pytest.mark.parametrize("how", HOW)
def test_modules_of_the_project_are_the_script_s_and_the_agent_is_complete(how, without, tmp_path):
    names = ["statistics", "psutil", "pynvml", "resource"] + ["telemetry"] * how.startswith("telemetry")
    assert messages(tmp_path, *names, **HOW[how]) == without


def test_a_package_of_the_project_is_the_script_s_with_all_its_modules(tmp_path):
    source = """
        import telemetry.api, telemetry.seams
        print(telemetry.MINE, telemetry.api.MINE, telemetry.seams.MINE)
        """
    beside = {f"telemetry/{name}.py": "MINE = 3\n" for name in ("__init__", "api", "seams")}
    unchanged(tmp_path, source, cold=True, under=COMMAND, beside=beside)


def test_a_module_of_the_project_is_that_of_a_spawned_worker(tmp_path):
    source = """
        from unnoticed.training import Items, Training

        class Named(Items):
            def __getitem__(self, index):
                import telemetry
                return telemetry.MINE

        if __name__ == "__main__":
            print([x.tolist() for x in Training(Named(), workers=1, multiprocessing_context="spawn").loader])
        """
    unchanged(tmp_path, source, beside={"telemetry.py": "MINE = 3\n"})


# -- how a module is imported ------------------------------------------------------------------------------------------

TORCH = {"torch/__init__.py": "print('importing torch')\nMINE = 3\n", "torch/data.txt": "data\n"}
"""Stands for torch, which takes seconds to import."""

CASES = {
    "finders": """
        import sys

        print([getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path])
        """,
    "the loader of a spec": """
        import importlib.util

        spec = importlib.util.find_spec("torch")
        print(type(spec.loader), spec.loader.name, spec.origin, spec.submodule_search_locations, spec.cached)
        """,
    "a module of a spec": """
        import importlib.util, sys

        spec = importlib.util.find_spec("torch")
        module = importlib.util.module_from_spec(spec)
        sys.modules["torch"] = module
        spec.loader.exec_module(module)
        print(module.MINE, module.__loader__ is module.__spec__.loader, module.__file__, type(module.__loader__))
        """,
    "a lazy module": """
        import importlib.util, sys

        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["torch"] = module
        spec.loader.exec_module(module)
        print("lazy", type(module).__name__)
        print(module.MINE, type(module).__name__, type(module.__loader__))
        """,
    "resources and sources": """
        import importlib.resources, importlib.util, inspect, pkgutil

        spec = importlib.util.find_spec("torch")
        print(spec.loader.get_source("torch"), spec.loader.is_package("torch"), spec.loader.get_filename("torch"))
        print(pkgutil.get_data("torch", "data.txt"))
        import torch
        print(importlib.resources.files("torch").joinpath("data.txt").read_text(), inspect.getsource(torch))
        print(importlib.reload(torch) is torch)
        """,
    "a finder of the script": """
        import importlib.abc, importlib.util, sys

        asked = []

        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                asked.append(name)

        sys.meta_path.insert(0, Finder())
        import torch
        importlib.util.find_spec("torch.distributed")
        print(asked)
        """,
    "a failed import": """
        import traceback

        for name in ("torch.distributed", "torch.broken", "torchdata.nodes"):
            try:
                __import__(name)
            except ImportError as error:
                print(traceback.format_exc(), error.name, error.path)
        """,
    "an import that raises": """
        import sys, traceback

        for _ in range(2):
            try:
                import safetensors.torch
            except ValueError:
                traceback.print_exc(file=sys.stdout)
                print("safetensors.torch" in sys.modules)
        """,
}
BESIDE = TORCH | {"safetensors/__init__.py": "", "safetensors/torch.py": "raise ValueError('mine')\n"}


@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_an_import(source, tmp_path):
    unchanged(tmp_path, source, cold=True, beside=BESIDE)
