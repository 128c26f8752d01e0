import json

import pytest

from benchmarks.method_table import KEYS, figures, in_order


def test_the_servers_share_of_a_round_is_without_its_evaluation(tmp_path):
    summary = dict.fromkeys(KEYS) | {"simulated_seconds": 7200.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    known = {"accuracy": None, "simulated_seconds": 0.0, "memory_utilisation": None, "bandwidth_utilisation": None}
    rounds = [
        known | {"round": 1, "wall_seconds": 100.0, "server_seconds": {"finish": 90.0}},  # starts the workers: left out
        known | {"round": 2, "wall_seconds": 10.0, "server_seconds": {"assign": 1.0, "finish": 1.0, "payload": 3.0}},
        known | {"round": 3, "wall_seconds": 30.0, "server_seconds": {"assign": 4.0, "evaluate": 20.0}},
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    found = figures(tmp_path)
    assert found["assign_and_finish_share"] == pytest.approx((2 / 10 + 4 / 10) / 2)
    assert found["simulated_hours"] == 2


def test_tiers_are_in_order_of_width_then_of_name_with_numbers_as_numbers():
    names = ["width-1/8", "exit 10", "exit 2", "width-1", "width-1/2", "big"]
    assert sorted(names, key=in_order) == ["width-1", "width-1/2", "width-1/8", "big", "exit 2", "exit 10"]
