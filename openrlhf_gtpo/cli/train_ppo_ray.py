"""``python3 -m openrlhf.cli.train_ppo_ray`` with GTPO and GRPO-S: the same flags and a few more (see ``--help``)."""

import sys
from collections.abc import Sequence

from openrlhf_gtpo.integration.errors import TrainingStopped, UsageError
from openrlhf_gtpo.integration.run import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when it ended well, 2 for a mistake in the command line, 1 where training stopped on bad data."""
    try:
        train(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"train_ppo_ray: {error}", file=sys.stderr)
        return 2
    except TrainingStopped as error:
        print(f"train_ppo_ray stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
