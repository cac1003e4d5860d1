"""Catches a patch or stand-in that changes behavior which OpenRLHF's own tests, shipped in its wheel, check."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).with_name("upstream_plugin.py")
# The number that 0.11.2 has on this stack; a suite that is skipped or not found shows nothing.
AT_LEAST = 140


@pytest.mark.slow
def test_openrlhfs_own_tests_pass_with_our_patch_active(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.origin is not None
    suite = Path(spec.origin).parents[1] / "tests"
    assert (suite / "test_reward_shaping.py").exists(), "this OpenRLHF ships no tests"
    root = PLUGIN.parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PLUGIN.parent), str(root), *sys.path])}
    options = ["-q", "-p", PLUGIN.stem, "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(suite)],
        cwd=tmp_path,  # this project's own `tests` must not shadow upstream's package of that name
        env=environment,
        capture_output=True,
        text=True,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-8000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed and int(passed[1]) >= AT_LEAST, output[-2000:]
