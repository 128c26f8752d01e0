"""The table of methods and models in the documentation, and cells of it made anew."""

import json

from benchmarks.any_model import zoo
from benchmarks.any_model.methods import PAGE, RECORDED, YES, page
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
