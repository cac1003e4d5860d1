"""Makes the reference and the rank programs beside the tests, and the pool of ranks, importable under every pytest
import mode."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "megatron")]
