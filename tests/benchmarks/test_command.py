"""``cli.benchmark`` finds the benchmarks of the clone that the package is in, from any folder, and says where they are
if there is no clone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "openrlhf_gtpo"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``, which is all that is added to Python's path."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.benchmark", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_ranks_find_the_benchmarks_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / PACKAGE.name).symlink_to(PACKAGE)  # as an editable install, which has the package alone
    words = "lm-head --shape 8x8x16 --tensor-parallel 2 --repeat 1 --output results.json"
    ended = run(tmp_path, *words.split())
    assert ended.returncode == 0, ended.stderr
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert case["tensor_parallel"] == 2


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    ended = run(tmp_path, "lm-head")
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("benchmark: ") and "clone" in ended.stderr and ended.stderr.count("\n") == 1
