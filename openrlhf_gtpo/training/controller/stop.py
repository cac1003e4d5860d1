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
    """The file whose presence is a request to stop. Following the request removes it, so that whoever made it sees
    that, and a resumed run does not find it."""
    return Path(args.ckpt.stop_file or Path(args.ckpt.path) / "stop")


def prepare(args: Arguments) -> None:
    """Prepare for requests to stop this run, and have SIGUSR1 to the driver make one.

    Without ``--ckpt.stop_file``, a request found here can only have been meant for an earlier run and is removed. A
    file that the flag names stays: whoever gives each run its own may ask before the run has come this far.

    Raises:
        OSError: no file can be created there.
    """
    path = stop_file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a file, not a folder, asks a run to stop", str(path))
    if not args.ckpt.stop_file:
        path.unlink(missing_ok=True)

    def ask(number: int, frame: FrameType | None) -> None:
        try:
            path.touch()
            said = "the run stops after this step, with a checkpoint."
        except OSError as error:
            said = f"the run goes on, as {path} cannot be made ({error.strerror})."
        print(f"SIGUSR1: {said}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGUSR1, ask)
