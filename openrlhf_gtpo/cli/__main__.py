"""`openrlhf-gtpo COMMAND …`: this package's commands under short names."""

import sys
from collections.abc import Sequence
from importlib import import_module

from openrlhf_gtpo.cli import Parser

# Command name, its module in this folder, and what it does.
COMMANDS = {
    "prepare": ("prepare", "make models and data"),
    "train": ("train_ppo_ray", "train; takes OpenRLHF's flags"),
    "report": ("report", "tables, plots and pages of runs"),
    "view": ("view", "which token was paid, as one HTML page"),
    "ask": ("ask", "ask a model a question"),
    "evaluate": ("evaluate", "mean@k and pass@k of a model"),
    "experiment": ("experiment", "methods × settings × seeds, one after another"),
    "score": ("score", "log-probs and entropies of your own text"),
    "plan": ("plan", "what fits on a cluster, and how fast it is"),
    "doctor": ("doctor", "is this node fit for a run?"),
    "convert": ("convert", "a model from or to Megatron's format"),
    "benchmark": ("benchmark", "measurements"),
    "ray-cluster": ("ray_cluster", "the nodes of a Ray cluster on several hosts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by ``argv[0]`` and return its status; 2 if there is no such command."""
    about = "\n".join(f"  {name:12} {what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(prog="openrlhf-gtpo", usage="openrlhf-gtpo COMMAND …", description=__doc__, epilog=about)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="a command below; each has --help")
    words = list(sys.argv[1:] if argv is None else argv)
    command = parser.parse_args(words[:1]).command
    status: int = import_module(f"openrlhf_gtpo.cli.{COMMANDS[command][0]}").main(words[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
