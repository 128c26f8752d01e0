"""The table of what devices get is of the recorded scores of tiers."""

from benchmarks.fashion_mnist.run import HERE, STUDY, delivered_table

RECORDED = {method: seeds for method, seeds in STUDY.known().items() if seeds}


def test_the_table_on_the_page_is_of_the_recorded_figures():
    page = (HERE / "README.md").read_text()
    shown = page.partition("<!-- delivered -->\n\n")[2].partition("\n\n<!-- end of delivered -->")[0]
    assert shown == delivered_table(RECORDED)


def test_a_device_without_a_model_counts_as_one_that_knows_nothing():
    tiers = {"width-1": 0.9, "width-1/2": 0.7, "width-1/4": 0.6, "width-1/8": 0.8}
    seeds = {"1": {"score_by_tier": tiers}, "2": {"score_by_tier": {"width-1": 0.5}}}
    *_, row = delivered_table({"exclusive": seeds}).splitlines()
    assert row == "| exclusive | 2 | 35.00 ± 35.36 | 0.00 ± 0.00 |"
    *_, row = delivered_table({"no-large-exclusive": {"1": {"score_by_tier": tiers}}}).splitlines()
    assert row == "| no-large-exclusive | 1 | 75.00 | 60.00 |"
