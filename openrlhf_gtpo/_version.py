"""The project's version, and the only place that states it."""

__version__ = "0.1.0"
