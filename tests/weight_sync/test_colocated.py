"""Catches a colocated engine that loads a buffer while the next bucket overwrites it, reads another GPU's buffer,
keeps old weights unnoticed, or leaves ranks waiting for one that has failed.

Trainer ranks (gloo) and engines are real processes with real memory between them; a plain model stands in for vLLM's.
"""

import pytest

from openrlhf_gtpo.platform.processes import run_processes
from tests.support.colocated_program import story

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_and_their_engines() -> None:
    run_processes(story, 2)
