"""The package layer needs none of the project's code, so that no change to the code rebuilds the layer."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dockerfiles import ROOT, instructions

SETUP_ENV = "examples/scripts/setup_env.sh"


@pytest.fixture
def layer(tmp_path) -> Path:
    """The files that Dockerfile.cpu copies before it installs packages, with an environment marked as complete."""
    said = [f"{i.name} {i.value}" for i in instructions("cpu")]
    (install,) = [n for n, text in enumerate(said) if text.startswith("RUN") and "--packages-only" in text]
    for text in said[:install]:
        if text.startswith("COPY"):
            source = [word for word in text.split()[1:] if not word.startswith("--")][0]
            (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True, timeout=120)
    digest = hashlib.sha256((tmp_path / "requirements" / "cpu.lock").read_bytes()).hexdigest()
    version = "{}.{}".format(*sys.version_info[:2])
    (tmp_path / ".venv" / ".environment_stamp").write_text(f"{digest} {tmp_path} {version}\n")
    return tmp_path


def set_up(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(root / SETUP_ENV), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_packages_alone_need_no_code_and_leave_the_project_for_later(layer: Path) -> None:
    assert not (layer / "setup.py").exists() and not (layer / "openrlhf_gtpo").exists()
    ended = set_up(layer, "--packages-only")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (layer / ".venv" / ".project_stamp").exists()
    # Without the flag the project is needed.
    assert set_up(layer).returncode != 0


def test_an_unknown_argument_is_one_sentence(layer: Path) -> None:
    ended = set_up(layer, "--packages")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "[setup] unknown arguments --packages; known: --cuda --packages-only --with-kernels.\n"
