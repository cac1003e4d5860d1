"""Each phase has its own peak, and where memory cannot be measured nothing is recorded."""

import json

PHASES = """
import json, torch
from openrlhf_gtpo.platform.memory import PeakByPhase

peaks = PeakByPhase()
with peaks.phase("small"):
    torch.ones(2**20)
with peaks.phase("big"):
    torch.ones(2**26)
with peaks.phase("big"):
    torch.ones(2**20)
with peaks.phase("after"):
    torch.ones(2**20)
torch.ones(2**25)
peaks.until_now("between")
print(json.dumps([peaks.take(), peaks.take()]))
"""


def test_each_phase_has_its_own_peak(fresh):
    # Blocks of this size go back to the system when they are freed.
    found, again = json.loads(fresh(PHASES, OPENRLHF_GTPO_PLATFORM="cpu", CUDA_VISIBLE_DEVICES=""))
    small, mib = found["small"], 2**20
    assert 250 * mib < found["big"] - small < 270 * mib
    assert abs(found["after"] - small) < 16 * mib
    assert 110 * mib < found["between"] - small < 150 * mib
    assert again == {}


# A container that lets nobody reset the peak.
REFUSES = """
from pathlib import Path

def refuse(path, text):
    assert str(path) == "/proc/self/clear_refs"
    raise PermissionError(path)

Path.write_text = refuse
"""


def test_where_memory_cannot_be_told_nothing_is(fresh):
    program = REFUSES + PHASES + "from openrlhf_gtpo.platform.memory import PeakMemory\nprint(PeakMemory().beyond())"
    phases, whole = fresh(program, OPENRLHF_GTPO_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="").splitlines()
    assert json.loads(phases) == [{}, {}] and whole == "None"
