"""A request to stop a run: a file that its controller looks for after each step.

The controller is a Ray actor on a node that Ray chose, and with ``ray job submit`` the driver is elsewhere too. A file
in the folder that all nodes share reaches the controller from everywhere: from a job script, from the driver's signal
handler and from a user's ``touch``.
"""

import errno
import signal
import sys
from pathlib import Path
from types import FrameType

from openrlhf_gtpo.training.arguments import Arguments


def stop_file(args: Arguments) -> Path:
    """Return the file that asks the run to stop. The run removes it when it stops, so that its maker sees that, and a
    resumed run does not find it."""
    return Path(args.ckpt.stop_file or Path(args.ckpt.path) / "stop")


def prepare(args: Arguments) -> None:
    """Prepare for requests to stop this run, and let SIGUSR1 to the driver make one.

    Without ``--ckpt.stop_file``, remove a request that is there already: it was meant for an earlier run. A file that
    the flag names stays, because it may be this run's own, made early.

    Raises:
        OSError: no file can be created there.
    """
    path = stop_file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "the request to stop must be a file, not a folder", str(path))
    if not args.ckpt.stop_file:
        path.unlink(missing_ok=True)

    def ask(number: int, frame: FrameType | None) -> None:
        try:
            path.touch()
            said = "the run saves a checkpoint after this step and stops."
        except OSError as error:
            said = f"the run does not stop, because {path} cannot be created ({error.strerror})."
        print(f"SIGUSR1: {said}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR1, ask)
