import runpy
from pathlib import Path

import pytest


@pytest.fixture
def browse(tmp_path):
    """Opens a page in Chromium (tests/browser.py)."""
    module = runpy.run_path(str(Path(__file__).parents[1] / "browser.py"))

    def look(path, **options):
        return module["browse"](path, tmp_path, **options)

    return look
