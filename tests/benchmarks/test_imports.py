"""Every benchmark can be imported: what one takes from another is there."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Contestants that run in an environment of their own, or beside a file of another folder.
APART = {"benchmarks.overhead.bare", "benchmarks.overhead.pfl_loop", "benchmarks.overhead.stock_flower"}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
]


@pytest.mark.parametrize("module", [module for module in MODULES if module not in APART])
def test_a_benchmark_can_be_imported(module):
    importlib.import_module(module)
