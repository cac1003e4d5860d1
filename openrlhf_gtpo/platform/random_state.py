"""The state of every random generator that training may use in this process, as plain values and tensors."""

import random
from typing import Any

import numpy
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's generators, and of the current CUDA device's."""
    legacy: Any = numpy.random.get_state()  # ("MT19937", (624,) keys, position, ...)
    numbers = (legacy[0], legacy[1].tolist(), *legacy[2:])
    state = {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def apply_random_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
