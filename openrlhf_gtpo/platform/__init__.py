"""What differs between a CUDA host and a host without one.

``detect`` says which of the two a run is for; ``activate`` makes a process of a CPU run answer the CUDA questions that
OpenRLHF asks. On a CUDA host ``activate`` returns at once: nothing is patched, replaced or set.
"""

import os

from openrlhf_gtpo.platform.detect import PLATFORM_VARIABLE, chosen_platform, detect

__all__ = ["PLATFORM_VARIABLE", "activate", "choose", "chosen_platform", "detect"]


def choose() -> None:
    """What a driver does first: take the platform that this host is, and prepare this process and those it starts."""
    os.environ[PLATFORM_VARIABLE] = detect()
    activate()


def activate() -> None:
    """Prepare this process for the platform that the driver chose (Ray calls it in every worker process).

    The choice travels in the environment, because a Ray worker without a GPU share sees no device on any host.
    """
    if chosen_platform() == "cpu":
        from openrlhf_gtpo.platform import cpu

        cpu.activate()
