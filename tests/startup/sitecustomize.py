"""Python reads this in every process that the tests start (tests/conftest.py puts its folder on PYTHONPATH). Imports
are most of the suite's time, and two things in them need not be done again and again.

An import of torch, vLLM or Megatron makes a million objects, which stay to the end. Python's garbage collector would
visit them repeatedly: that takes a fifth of the time of such an import, and a quarter of that of short tests. Here it
visits each once, a few at a time, while they are still in the processor's cache.

Transformers 5 reads all of its 1,500 model files at each import, twice, and the file lists of all installed packages:
a tenth of the time. What it finds is kept in the environment until a package comes or goes.
"""

import contextlib
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

gc.set_threshold(5_000, 1_000, 1_000)

_SCANS = "transformers.utils.import_utils"


def _find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    if name != _SCANS:
        return None
    sys.meta_path.remove(_finder)
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None or spec.origin is None:
        return spec
    packages, execute = spec.origin.rsplit(os.sep, 3)[0], spec.loader.exec_module

    def execute_and_keep(module: ModuleType) -> None:
        import importlib.metadata

        importlib.metadata.packages_distributions = _kept(importlib.metadata.packages_distributions, packages)
        execute(module)
        module.define_import_structure = _kept(module.define_import_structure, packages)

    spec.loader.exec_module = execute_and_keep
    return spec


def _kept(function: Any, packages: str) -> Any:
    """``function``, which answers from a file if it was asked the same with these ``packages`` before."""
    import pickle

    def ask(*arguments: Any, **options: Any) -> Any:
        key = f"{function.__name__}{arguments}{options}{os.stat(packages).st_mtime_ns}"
        path = os.path.join(sys.prefix, ".kept_by_tests", key.replace(os.sep, "_")[-200:])
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return pickle.load(file)
        answer = function(*arguments, **options)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.{os.getpid()}", "wb") as file:
                pickle.dump(answer, file)
            os.replace(file.name, path)
        return answer

    return ask


_finder = SimpleNamespace(find_spec=_find_spec)
sys.meta_path.insert(0, _finder)
