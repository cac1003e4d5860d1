"""Shared by the tests of `platform`: a fresh interpreter, because they look at the state of a process."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support import ROOT

Fresh = Callable[..., str]


@pytest.fixture
def fresh() -> Fresh:
    """Run a program in its own process, with ``variables`` and little else of ours, and return what it printed."""

    def run(program: str, **variables: str) -> str:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
        ended = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=kept | variables, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    return run
