"""``python3 -m openrlhf.cli.train_ppo_ray`` with GTPO and GRPO-S: the same flags and a few more (see ``--help``)."""

import os
import sys
from collections.abc import Sequence

from openrlhf_gtpo.cli import hide_key
from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.integration.controller.stop import STOPPED_STATUS
from openrlhf_gtpo.integration.run import train
from openrlhf_gtpo.launch.ray_node import close_own_ray


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status: 0 when it ended well, 2 for a mistake in the command line, 1 where training cannot go on
    (bad data, a full disk, a dead node), 75 where it was asked to stop and saved a checkpoint, 130 after Ctrl-C."""
    try:
        train(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"train_ppo_ray: {error}", file=sys.stderr)
        return 2
    except TrainingStopped as error:
        print(f"train_ppo_ray stopped: {error}", file=sys.stderr)
        return 1
    except StoppedOnRequest as error:
        print(f"train_ppo_ray stopped: {error}", file=sys.stderr)
        return STOPPED_STATUS
    except KeyboardInterrupt:
        print(
            "train_ppo_ray stopped: interrupted; with --ckpt.load_enable it goes on from its last checkpoint.",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    close_own_ray(os.environ)
    sys.exit(main(hide_key(sys.argv[1:])))
