"""Runs the launch scripts from another folder, with almost nothing of the caller's environment."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
PRESETS = sorted(path.stem for path in (SCRIPTS / "presets").glob("*.sh"))


def run_script(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of them to its end."""
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "VIRTUAL_ENV")}
    command = ["bash", str(SCRIPTS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, env=clean | environment, cwd="/")


def resolved(script: str, *words: str, **environment: str) -> list[str]:
    """The words of the command that a script resolves to."""
    preset, flags = (words[:1], words[1:]) if script == "train.sh" else ((), words)
    done = run_script(script, *preset, "--dry-run", *flags, **environment)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", " "))
