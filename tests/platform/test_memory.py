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


def test_where_memory_cannot_be_told_nothing_is(fresh):
    program = PHASES.replace(
        "peaks = ", "from openrlhf_gtpo.platform import memory\nfrom pathlib import Path\npeaks = "
    )
    program = program.replace("peaks = ", "memory._PROCESS = Path('/nowhere')\npeaks = ")
    assert json.loads(fresh(program, OPENRLHF_GTPO_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")) == [{}, {}]


def test_a_container_that_lets_nobody_reset_the_peak(fresh, tmp_path):
    (tmp_path / "clear_refs").mkdir()  # is there, and cannot be written
    (tmp_path / "status").write_text("VmHWM: 2 kB\nVmRSS: 1 kB\n")
    program = f"""
from pathlib import Path
from openrlhf_gtpo.platform import memory
memory._PROCESS = Path({str(tmp_path)!r})
print(memory.PeakMemory().beyond())
"""
    assert fresh(program, OPENRLHF_GTPO_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="").strip() == "None"
