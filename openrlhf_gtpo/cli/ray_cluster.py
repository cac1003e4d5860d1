"""``python3 -m openrlhf_gtpo.cli.ray_cluster``: the nodes of a Ray cluster over several hosts, and waiting for them.

    head   --address IP --token FILE                this host as the head, until it is ended
    worker --address IP --token FILE --head IP:PORT this host as another node, until it is ended
    wait   --token FILE --nodes n1 n2 n3            until all have joined and the cluster takes jobs

FILE is a secret that all hosts read; `head` makes it. What follows -- goes to `ray start`.
"""

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.launch.ray_node import Node, make_token, run_node
from openrlhf_gtpo.launch.ray_wait import Dashboard, NotJoined, wait_for_nodes

_PORT = 6379


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: of Ray, or 1 where the cluster is not whole in time, 2 for a mistake in the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    more = words[words.index("--") + 1 :] if "--" in words else []
    args = _parser().parse_args(words[: len(words) - len(more) - 1] if "--" in words else words)
    if args.command == "wait":
        return _wait(args)
    if args.token is not None:
        if args.command == "head":
            make_token(args.token)
        elif not args.token.is_file():
            print(
                f"ray_cluster: --token {args.token} is not there; the head makes it, on a shared disk.",
                file=sys.stderr,
            )
            return 2
    head = args.head if args.command == "worker" else None
    port = args.port if args.command == "head" else _PORT
    node = Node(args.name, args.address, head, port, args.temporary, more)
    try:
        return run_node(node, args.token, args.logs)
    except FileNotFoundError as error:
        hint = "activate the environment that has Ray" if error.filename == "ray" else "make it, or name another"
        print(f"ray_cluster: {error.filename} is not there; {hint}.", file=sys.stderr)
        return 2


def _wait(args: argparse.Namespace) -> int:
    try:
        wait_for_nodes(Dashboard(args.dashboard, args.token), args.nodes, args.timeout)
    except NotJoined as error:
        print(f"ray_cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    head = commands.add_parser("head", help="this host as the head")
    head.add_argument("--port", type=int, default=_PORT, help="for the other nodes; the dashboard has the next one")
    worker = commands.add_parser("worker", help="this host as another node")
    worker.add_argument("--head", required=True, help="IP:PORT of the head")
    for node in (head, worker):
        node.add_argument("--address", required=True, help="of this host, as the other hosts reach it")
        node.add_argument("--name", default=socket.gethostname(), help="of this node in messages (the host's name)")
        node.add_argument("--logs", type=Path, help="where Ray's logs of this node are copied in the end")
        node.add_argument(
            "--temporary", type=Path, default=Path("/tmp"), help="a folder of this host's for Ray's files"
        )
    wait = commands.add_parser("wait", help="until all nodes have joined")
    wait.add_argument("--dashboard", default=f"http://127.0.0.1:{_PORT + 1}", help="of the head")
    wait.add_argument("--nodes", nargs="+", required=True, help="their names")
    wait.add_argument("--timeout", type=float, default=600.0, help="in seconds")
    for command in (head, worker, wait):
        command.add_argument("--token", type=Path, help="file with the cluster's secret (none: anyone may use it)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
