"""Measures how far resident memory rises during a call at T = 16384. Run it in its own process; it prints JSON.

Usage: MALLOC_MMAP_THRESHOLD_=65536 python -m tests.support.lm_head_memory
Tiles get the size they have on an accelerator, so that only the budget limits them. Needs Linux with glibc: the peak
is VmHWM, and the variable makes glibc return freed memory, so that no call reuses what another one left.
"""

import json

import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy, tiles
from openrlhf_gtpo.platform.memory import PeakMemory

TOKENS, WIDTH, COLUMNS = 16384, 64, 2048
MIB = 2**20
# (dtype, what it does, budget in MiB). In 5 MiB, a float32 d_hidden of 4 MiB leaves too little room for one turn.
CASES = [
    (dtype, what, budget)
    for dtype in ("bfloat16", "float32")
    for what, budget in (("forward", 32), ("log_prob", 32), ("both", 32), ("both", 5), ("main_grad", 5))
]


def call(dtype: torch.dtype, what: str, chunk_bytes: int, tokens: int = TOKENS) -> int:
    """Peak bytes, less what existed before the call and the gradients and outputs that exist after it."""
    hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(COLUMNS, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(COLUMNS, (tokens,))
    weight.main_grad = torch.zeros(COLUMNS, WIDTH)
    memory = PeakMemory()
    with torch.set_grad_enabled(what != "forward"):
        outputs = linear_log_prob_and_entropy(
            hidden, weight, labels, chunk_bytes=chunk_bytes, accumulate_into_main_grad=what == "main_grad"
        )
    if what != "forward":
        wanted = outputs[:1] if what == "log_prob" else outputs
        torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
    results = [*outputs, *(leaf.grad for leaf in (hidden, weight) if leaf.grad is not None)]
    return memory.beyond() - sum(tensor.nbytes for tensor in results)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tiles.CPU_TILE = tiles.DEVICE_TILE
    rows = []
    for name, what, budget in CASES:
        dtype = getattr(torch, name)
        call(dtype, what, 2 * MIB, tokens=512)  # what a process allocates once: threads, oneDNN's compiled kernels
        peak = call(dtype, what, budget * MIB)
        rows.append({"dtype": name, "what": what, "budget_mib": budget, "peak_mib": round(peak / MIB, 2)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
