"""A time limit for every test of pipelines."""

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def time_limit():
    """Ends the process on a deadlock, which compiled code cannot interrupt."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
