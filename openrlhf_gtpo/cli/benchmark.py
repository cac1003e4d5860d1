"""``python3 -m openrlhf_gtpo.cli.benchmark NAME``: measurements whose numbers the documentation quotes.

They live in ``benchmarks/suite`` of the repository, which is not installed. This command runs them from a clone.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.cli import exit_status, hide_key

if __name__ == "__main__":
    hide_key()

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.tools.launch.ray_node import close_own_ray

_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return 0, 2 after one sentence about a user error, or 1 if a process failed."""
    status = exit_status("benchmark", _find_benchmarks)
    if status:
        return status
    from benchmarks.suite import command

    return command.main(argv)


def _find_benchmarks() -> None:
    """Let this process and its children, such as ranks and Ray's workers, import ``benchmarks``."""
    if not (_ROOT / "benchmarks" / "suite").is_dir():
        raise UsageError(
            f"the package in {_ROOT} comes without the benchmarks; clone its repository and run this command there, "
            "or install the clone with pip install -e."
        )
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), *paths]))


if __name__ == "__main__":
    close_own_ray(os.environ)
    sys.exit(main())
