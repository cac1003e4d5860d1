"""A run for whose processes Ray has no place says so, with what it asks for and whose it is."""

import subprocess
import sys

import pytest

# Two drivers of one real Ray, whose GPUs the first has when the second begins.
HOLDER = """
import subprocess, sys
import ray
from ray.util.placement_group import placement_group, remove_placement_group

ray.init("local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
group = placement_group([{"GPU": 1, "CPU": 1}] * 2)
ray.get(group.ready())
address = ray.get_runtime_context().gcs_address
run = subprocess.Popen([sys.executable, "-c", sys.argv[1], address], stderr=subprocess.PIPE, text=True)
print(next(line for line in run.stderr if "Ray has had" in line or "Error" in line), flush=True)
remove_placement_group(group)
run.communicate()
sys.exit(run.returncode)
"""

RUN = """
import sys
import ray
from ray.util.placement_group import placement_group
from openrlhf_gtpo.training.controller.placement import waits_reported

ray.init(sys.argv[1], log_to_driver=False)
with waits_reported(every=0.5, patience=2.0):
    ray.get(placement_group([{"GPU": 1, "CPU": 1}] * 2).ready(), timeout=300)
"""


@pytest.mark.slow
def test_a_run_that_waits_for_another_runs_gpus_says_so_and_goes_on_once_they_are_free() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER, RUN], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "no place for 2 of this run's processes" in said, done.stderr
    assert "they ask for 2 GPUs and 2 CPUs, and the cluster has 2 GPUs and 3 CPUs, of which 0 GPUs and 1 CPUs" in said
    assert "; job 01000000 holds 2 GPUs and 2 CPUs" in said
