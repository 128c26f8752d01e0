"""Settings of all tests: one torch thread, own cache folder, and skips that count as failures where all can run."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Partitions computed by tests stay out of the user's cache."""
    before = os.environ.get("WILDFLOWER_CACHE")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["WILDFLOWER_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["WILDFLOWER_CACHE"]
    else:
        os.environ["WILDFLOWER_CACHE"] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With WILDFLOWER_NO_SKIPS set, as in CI, a skipped test fails: whatever it lacked is to be installed."""
    report = yield
    if report.skipped and os.environ.get("WILDFLOWER_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is not allowed here: {report.longrepr}"
    return report
