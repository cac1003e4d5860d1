"""What tests share and is no test: models, rows and command lines, stand-ins, reference loops, and the programs of
ranks (:mod:`rank_pool`) and of other processes.

Every process imports it as ``tests.support``: ``tests/conftest.py`` puts this project in front of OpenRLHF's wheel,
which installs a package ``tests`` too.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
