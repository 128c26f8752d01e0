"""The table of methods and models in the documentation, and cells of it made anew."""

import json
import re

import pytest

from benchmarks.any_model import zoo
from benchmarks.any_model.methods import PAGE, RECORDED, YES, cell, page, settings
from tests.small_run import small_config
from wildflower.server_app.app import build
from wildflower.strategies import METHODS

CELLS = json.loads(RECORDED.read_text())["cells"]
# Whose packages are among those that tests have; the others' cells are recorded by the command alone.
HERE = (*zoo.PLAIN, *zoo.TRANSFORMERS)


def test_the_page_has_what_was_recorded():
    table = PAGE.read_text().partition("<!-- models -->")[2].partition("<!-- end of models -->")[0]
    assert table.strip() == page(CELLS)


def test_every_method_is_in_the_table_and_no_answer_is_without_a_reason():
    assert set(HERE) <= set(CELLS) <= set(zoo.MODELS)
    for model, found in CELLS.items():
        assert list(found) == list(METHODS), model
        assert all(why == YES or len(why.split()) > 4 for why in found.values())


def test_what_is_refused_today_is_what_was_refused(tmp_path):
    for method, why in CELLS["mlp"].items():
        if why != YES:
            with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
                build(small_config(tmp_path, **settings("mlp", method)))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "method"), [(HERE[number % len(HERE)], method) for number, method in enumerate(METHODS)]
)
def test_a_cell_made_anew_is_as_recorded(model, method):
    assert cell(model, method) == CELLS[model][method]
