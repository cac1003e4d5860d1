"""The launch scripts, run as from another folder and with nothing of the caller's environment."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
LAUNCHERS = sorted(path.name for path in SCRIPTS.glob("train_*.sh") if not path.stem.endswith("_slurm"))


def run_script(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What becomes of one of them."""
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "VIRTUAL_ENV")}
    command = ["bash", str(SCRIPTS / script), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=clean | environment, cwd="/", timeout=60)


def resolved(script: str, *flags: str, **environment: str) -> list[str]:
    """The words of the command that it resolves to."""
    done = run_script(script, "--dry-run", *flags, **environment)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", " "))
