import json

from benchmarks.model_search import run


def test_every_row_of_the_papers_table_is_a_row_of_every_twin():
    for twin in run.TWINS:
        assert set(run.PAPER) <= set(run.methods_of(twin)) - set(run.ONCE)


def test_finals_stand_beside_the_papers(tmp_path, monkeypatch):
    """Seeds of 0.5, as an earlier version recorded it, and 0.7: mean 60, standard deviation 10 times the root of 2."""
    seeds = {"1": {"final_score": 0.5}, "2": {"final_score": 0.7}}
    (tmp_path / "results-vit.json").write_text(json.dumps({"results": {"heterofl": seeds}}))
    monkeypatch.setattr(run, "HERE", tmp_path)
    lines = run.beside_the_paper().splitlines()
    assert lines[0] == ("| method | paper, setting 4 | resnet | paper, setting 5 | vit | paper, setting 6 | bert |")
    assert "| heterofl | 61.0 |  | 41.9 | 60.00 ± 14.14 | 54.3 |  |" in lines
    assert len(lines) == 2 + len(run.PAPER)
