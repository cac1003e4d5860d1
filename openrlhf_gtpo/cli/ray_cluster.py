"""`python3 -m openrlhf_gtpo.cli.ray_cluster`: runs a Ray cluster's nodes on several hosts, and waits for them.

    head   --address IP --token FILE                run the head on this host, until it is ended
    worker --address IP --token FILE --head IP:PORT run another node on this host, until it is ended
    wait   --token FILE --nodes n1 n2 n3            wait until all have joined and the cluster takes jobs

FILE holds a secret that all hosts read; `head` creates it. Arguments after -- go to `ray start`.
"""

import argparse
import math
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.tools.launch.ray_node import Node, make_token, run_node
from openrlhf_gtpo.tools.launch.ray_wait import Dashboard, NotJoined, wait_for_nodes

_PORT, _TIMEOUT = 6379, 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return Ray's exit status, 1 if the cluster is not complete in time, or 2 for a user error."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args, more = _parser().parse_args(words[:end]), words[end + 1 :]
    try:
        if args.token is not None and args.command == "head":
            make_token(args.token)
        elif args.token is not None and not args.token.is_file():
            return _say(f"--token {args.token} does not exist; the head creates it, on a shared disk.", 2)
        if args.command == "wait":
            wait_for_nodes(Dashboard(args.dashboard, args.token), args.nodes, args.timeout)
            return 0
        node = Node(args.name, args.address, args.head, args.port, args.temporary, more, args.timeout)
        return run_node(node, args.token, args.logs)
    except KeyboardInterrupt:
        return _say("interrupted.", 130)
    except NotJoined as error:
        return _say(str(error), 1)
    except FileNotFoundError as error:
        hint = "activate the environment that has Ray" if error.filename == "ray" else "create it, or name another"
        return _say(f"{error.filename} was not found; {hint}.", 2)
    except OSError as error:
        return _say(f"{str(error)[:300]}.", 2)


def _say(sentence: str, status: int) -> int:
    print(f"ray_cluster: {sentence}", file=sys.stderr)
    return status


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.ray_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    head = commands.add_parser("head", help="run the head on this host")
    head.set_defaults(head=None, timeout=_TIMEOUT)
    head.add_argument("--port", type=int, default=_PORT, help="port for other nodes; the dashboard gets the next one")
    worker = commands.add_parser("worker", help="run another node on this host")
    worker.set_defaults(port=_PORT)
    worker.add_argument("--head", required=True, help="IP:PORT of the head")
    worker.add_argument("--timeout", type=seconds, default=_TIMEOUT, help="seconds to wait for a ready head")
    for node in (head, worker):
        add = node.add_argument
        add("--address", required=True, help="address of this host for the other hosts")
        add("--name", default=socket.gethostname(), help="name of this node in messages (default: the host's)")
        add("--logs", type=Path, help="folder to copy this node's Ray logs to at the end")
        add("--temporary", type=Path, default=Path("/tmp"), help="folder for Ray's files on this host")
    wait = commands.add_parser("wait", help="wait until all nodes have joined")
    wait.add_argument("--dashboard", default=f"http://127.0.0.1:{_PORT + 1}", help="URL of the head's dashboard")
    wait.add_argument("--nodes", nargs="+", required=True, help="names of the nodes to wait for")
    wait.add_argument("--timeout", type=seconds, default=_TIMEOUT, help="seconds to wait")
    for command in (head, worker, wait):
        command.add_argument(
            "--token", type=Path, help="file with the cluster's secret; without it, anyone may use the cluster"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
