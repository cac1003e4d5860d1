"""What tests share and is no test: models, rows and command lines, stand-ins, reference loops, and the programs of
ranks (:mod:`rank_pool`) and of other processes.

Every process imports it as ``tests.support``: ``tests/conftest.py`` puts this project in front of OpenRLHF's wheel,
which installs a package ``tests`` too.
"""

from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def command_of(process: psutil.Process) -> str:
    """Its command line, empty once it has ended: a list of processes is old when it is read."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
