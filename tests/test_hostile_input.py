"""Whatever reads foreign data accepts it or refuses it in one line: some cases for each parser of
benchmarks/reliability/fuzz.py, which draws ten thousand."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

FILE = Path(__file__).resolve().parents[1] / "benchmarks/reliability/fuzz.py"
# How many cases fit into a second; for the other parsers it is hundreds.
FEW = {"data_set": 8, "train_flags": 20, "cli_flags": 80, "gguf": 40, "config_run": 40, "weights_index": 60}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ):
        spec.loader.exec_module(module)
    return module


fuzz = load()


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Undo what a command line does to the environment: it may choose a platform there."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_no_case_ends_without_a_clear_error(name: str, own_environment: None) -> None:
    tally = fuzz.fuzz(name, FEW.get(name, 200), 7)
    assert not tally.crashes
    assert tally.ends["taken"] + tally.ends["refused"] >= 8


def test_a_crash_and_a_refusal_of_two_lines_are_counted() -> None:
    def read(case: int) -> None:
        if case == 1:
            raise KeyError("x")
        if case == 2:
            raise fuzz.UsageError("one\ntwo")
        if case == 3:
            raise fuzz.UsageError("one line")

    tally = fuzz.Tally(fuzz.Parser(fuzz.st.none(), read))
    for case in range(4):
        tally.run(case)
    assert tally.summary() == {"cases": 4, "taken": 1, "refused": 1, "crashed": 2} and len(tally.crashes) == 2
