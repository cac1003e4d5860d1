"""Python reads this in every process that the tests start (tests/conftest.py puts its folder on PYTHONPATH).

An import of torch, vLLM or Megatron makes a million objects, which stay to the end. Python's garbage collector would
visit them again and again: that takes a fifth of the time of such an import, and a quarter of that of short tests.
"""

import gc

gc.set_threshold(100_000, 50, 100)
