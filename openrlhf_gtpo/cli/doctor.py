"""`python3 -m openrlhf_gtpo.cli.doctor`: checks whether this node can run training. Prints a line for each check.

A line says `ok`, `warning` (a run may be slow or fail later), `wrong` (a run would fail) or `skipped` (this host
cannot tell). The exit status is 1 if anything is wrong, else 0. On a node with GPUs, torch computes on each of them
and the Megatron actor is imported. Elsewhere a check imports only what it needs (Ray for `--shared`, Transformers for
`--model`).
"""

import sys
from collections.abc import Sequence

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.tools import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each check. Return 1 if any is wrong, else 0."""
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.doctor", description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs this node must have (default: any)")
    parser.add_argument("--model", metavar="MODEL", help="Hugging Face checkpoint: a folder, or a name on the Hub")
    parser.add_argument("--port", type=int, metavar="N", help="first of the four ports that Ray uses on the head node")
    parser.add_argument("--shared", metavar="FILE", help="file that another node wrote to a shared folder")
    parser.add_argument("--temporary", default="/tmp", metavar="DIR", help="folder for Ray's files on this node")
    args = parser.parse_args(argv)
    statuses: list[str] = []

    def run_checks() -> None:
        for name, check in doctor.CHECKS.items():
            try:
                line = check(args)
            except UsageError as error:
                line = doctor.wrong(str(error))
            except Exception as error:  # imports and file systems may raise anything on a broken node
                line = doctor.wrong(f"{type(error).__name__}: {one_line(error):.300}")
            statuses.append(line.status)
            print(f"{line.status:<8} {name}: {line.text}", flush=True)

    return exit_status("doctor", run_checks) or int("wrong" in statuses)


if __name__ == "__main__":
    sys.exit(main())
