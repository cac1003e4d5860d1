"""Shaping a full batch of 1024 x 8192 tokens takes under 2 s on two cores, and under 3 times its inputs' memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# This runs in a fresh process, because the peak resident size of a process never goes down. It reads VmHWM, because a
# new process inherits `ru_maxrss` from its parent, and that of a pytest that has run other tests exceeds what this
# needs. It takes one thread's CPU time, as wall time includes the neighbors; two idle cores are no slower than one.
PROGRAM = """
import json, time, torch
from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages

torch.set_num_threads(1)
torch.manual_seed(0)
num_rows, num_columns, group_size = 1024, 8192, 16
entropy = torch.empty(num_rows, num_columns).uniform_(0, 3)
mask = torch.arange(num_columns) < torch.randint(num_columns // 2, num_columns + 1, (num_rows, 1))
outcome = (torch.rand(num_rows) < 0.5).float()
group_ids = torch.arange(num_rows) % (num_rows // group_size)

def shape(rows):
    return gtpo_advantages(entropy[:rows], mask[:rows], outcome[:rows], group_ids[:rows] % (rows // 2), GTPOConfig())

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

shape(4)  # loads what is loaded on first use
before, seconds = peak(), []
for _ in range(3):
    start = time.process_time()
    shape(num_rows)
    seconds.append(time.process_time() - start)
print(json.dumps({"seconds": min(seconds), "extra": (peak() - before) / (entropy.nbytes + mask.nbytes)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from Linux's /proc")
def test_time_and_memory_of_a_full_batch():
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    cost = json.loads(run.stdout)
    assert cost["seconds"] < 2, cost
    assert cost["extra"] < 3, cost
