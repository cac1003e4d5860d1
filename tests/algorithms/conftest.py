"""Makes the reference loops beside the tests importable, which ``--import-mode=importlib`` does not do by itself.

(They cannot be ``tests.algorithms.algorithms_reference``: OpenRLHF's wheel installs a top-level package ``tests``.)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
