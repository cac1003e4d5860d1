"""A command line that is good, from the tests of the checks."""

from tests.training.checks.conftest import command, model  # noqa: F401  # fixtures
