"""A script imports what it would import without the agent, and in the same way."""

from __future__ import annotations

import pytest

from tests.faults.processes import end_of, events
from tests.unnoticed.pairs import COMMAND, MODULE, unchanged

# -- a project has modules of its own under the names of those that the agent imports ----------------------------------

IMPORTS = """
    import os
    from unnoticed.looks import looked_at
    import {name}
    for _ in looked_at(2):
        pass
    print({name}.MINE, os.path.relpath({name}.__file__))
"""
HOW = {
    "python -m telemetry run script.py": {"under": MODULE},
    "telemetry run script.py": {"under": COMMAND},
    "telemetry run -m script": {"under": COMMAND, "module": True},
}
NAMED = {
    "python -m telemetry run script.py": ["statistics", "psutil", "pynvml", "resource"],
    "telemetry run script.py": ["telemetry", "statistics", "resource", "psutil", "pynvml", "config"],
    "telemetry run -m script": ["telemetry", "statistics", "config"],
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """What the agent logs of parts that do not work on this machine."""
    folder = tmp_path_factory.mktemp("plain")
    unchanged(folder, IMPORTS.format(name="config"), cold=True, beside={"config.py": "MINE = 3\n"})
    return {line["message"] for line in events(folder / "ours-run", "error")}


@pytest.mark.parametrize("how,name", [(how, name) for how, names in NAMED.items() for name in names])
def test_a_module_of_the_project_is_the_script_s_and_the_agent_is_complete(how, name, messages, tmp_path):
    unchanged(tmp_path, IMPORTS.format(name=name), cold=True, beside={f"{name}.py": "MINE = 3\n"}, **HOW[how])
    assert end_of(tmp_path / "ours-run")["errors_total"] == {}
    assert {line["message"] for line in events(tmp_path / "ours-run", "error")} == messages


def test_a_package_of_the_project_is_the_script_s_with_all_its_modules(tmp_path):
    source = """
        import telemetry.api, telemetry.hooks
        print(telemetry.MINE, telemetry.api.MINE, telemetry.hooks.MINE)
        """
    beside = {f"telemetry/{name}.py": "MINE = 3\n" for name in ("__init__", "api", "hooks")}
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
