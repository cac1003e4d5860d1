"""Python reads this in every process that the tests start (tests/conftest.py puts its folder on PYTHONPATH).

What an import of torch, vLLM or Megatron makes, a million objects, stays to the end. Python's garbage collector would
visit it again and again: a fifth of the time of such an import, and a quarter of that of short tests.
"""

import gc

gc.set_threshold(100_000, 50, 100)
