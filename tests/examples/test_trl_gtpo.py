"""The adapter for TRL: what its micro-batches carry is this package's advantages of whole groups."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from tests.support import ROOT

pytest.importorskip("trl", reason="TRL is not installed (docs/implementing.md)")

PROGRAM = ROOT / "tests" / "support" / "trl_program.py"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "samples"), [(1, 3), (2, 4)])
def test_micro_batches_carry_the_advantages_of_whole_groups(tmp_path: Path, processes: int, samples: int) -> None:
    """In two processes the border lies within a group; the optimizer step has three micro-batches of shuffled rows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'elsewhere'}", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*command, str(PROGRAM), str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [json.loads(line) for path in sorted(tmp_path.glob("rows-*.jsonl")) for line in path.open()]
    assert len(rows) == 6 * processes and len({row["rank"] for row in rows}) == processes
    groups = sorted({row["prompt"] for row in rows})
    assert all(sum(row["prompt"] == group for row in rows) == samples for group in groups)

    # The advantages anew, from entropies of one plain forward for each row.
    width = max(len(row["entropy"]) for row in rows)
    entropy, mask = torch.zeros(len(rows), width, dtype=torch.float64), torch.zeros(len(rows), width).bool()
    for i, row in enumerate(rows):
        entropy[i, : len(row["entropy"])] = torch.tensor(row["entropy"])
        mask[i, : len(row["entropy"])] = True
    outcome = torch.tensor([row["reward"] for row in rows])
    group_ids = torch.tensor([groups.index(row["prompt"]) for row in rows])
    expected = gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig())
    assert expected.abs().max() > 0.1
    for row, wanted in zip(rows, expected, strict=True):
        carried = torch.tensor(row["advantages"], dtype=torch.float64)
        torch.testing.assert_close(carried, wanted[: len(carried)], rtol=0, atol=1e-6)
    changed = json.loads((tmp_path / "changed.json").read_text())
    assert changed > 0, "the step changed no weight"
