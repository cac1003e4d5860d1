"""The images' files as the tests read them: instructions of a Dockerfile, and what .dockerignore lets into a build."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = {"cuda": ROOT / "docker" / "Dockerfile", "cpu": ROOT / "docker" / "Dockerfile.cpu"}


class Instruction(NamedTuple):
    """One instruction: its name in capitals, and the rest as one line."""

    name: str
    value: str


def instructions(platform: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in order, without comments."""
    lines = [line for line in DOCKERFILES[platform].read_text().splitlines() if not re.match(r"\s*#|\s*$", line)]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def arguments(platform: str) -> dict[str, str]:
    """The defaults of a Dockerfile's ARGs."""
    return dict(i.value.split("=", 1) for i in instructions(platform) if i.name == "ARG" and "=" in i.value)


def is_ignored(path: str) -> bool:
    """True if .dockerignore keeps a file out of the build: the last pattern that matches it or a parent decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        expression = re.escape(pattern.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{expression}(/.*)?", path):
            ignored = not pattern.startswith("!")
    return ignored
