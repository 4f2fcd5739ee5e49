"""Every module of tests is collected."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_no_folder_of_tests_has_a_name_that_pytest_passes_over(
    request: pytest.FixtureRequest,
) -> None:
    passed_over = request.config.getini("norecursedirs")
    assert "build" in passed_over
    found = [
        module
        for folder in request.config.getini("testpaths")
        for module in (ROOT / folder).rglob("test_*.py")
        for part in module.relative_to(ROOT).parts[:-1]
        if any(fnmatch(part, pattern) for pattern in passed_over)
    ]
    assert found == []
