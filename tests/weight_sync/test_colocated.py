"""Would catch a colocated engine that loads a buffer as the next bucket overwrites it, reads another GPU's, keeps old
weights unnoticed, or leaves ranks waiting for one that has failed.

Trainer ranks (gloo) and engines are real processes, and so is the memory between them; vLLM's model is a plain one.
"""

import pytest
from colocated_program import story

from openrlhf_gtpo.platform.processes import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_and_their_engines() -> None:
    run_processes(story, 2)
