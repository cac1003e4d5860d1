"""Lets these tests import the helpers beside them in any import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
