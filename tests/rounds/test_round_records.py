"""Bytes of a round, by what they travel for."""

from collections import Counter

import pytest

from tests.small_run import connected_grid, simulated_grid, small_config, started
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_rounds

NORMED = {"family": "cnn3", "statistics__devices": 3, "test_fraction": 0.25, "rounds": 2}


@pytest.mark.parametrize("strategy", ["heterofl", "wildflower"])
def test_training_takes_the_same_bytes_however_often_one_evaluates(strategy, tmp_path):
    seldom, often = ({"evaluate_every": 2}, {"evaluate_every": 1, "personal__every": 1})
    found = []
    for changes in (seldom, often):
        engine, scorer = started(small_config(tmp_path, **NORMED | {"strategy": strategy} | changes))
        found.append([engine.run_round(simulated_grid(), number, scorer).record for number in (1, 2)])
    for without, with_scores in zip(*found, strict=True):
        for way in ("down", "up"):
            assert without[f"training_bytes_{way}"] == with_scores[f"training_bytes_{way}"] > 0
        assert with_scores["statistics_bytes_down"] > with_scores["statistics_bytes_up"] > 0
        assert with_scores["scoring_bytes_down"] > without["scoring_bytes_down"] == 0
    assert found[0][0]["statistics_bytes_down"] == found[0][0]["statistics_bytes_up"] == 0


def test_what_is_counted_is_what_travels(tmp_path):
    """On nodes with one device each: what lies in the messages, by their kinds and the tensor sets that come back."""
    grid = connected_grid(6, tmp_path)
    down, up = Counter(), Counter()
    push = grid.push_messages

    def sent(messages):
        for message in messages:
            kind = message.metadata.message_type
            down[kind] += sum(len(array.data) for array in message.content.get("weights", {}).values())
        return push(messages)

    def came(message):
        kind = message.metadata.message_type
        up[kind] += sum(len(array.data) for array in message.content.get("weights", {}).values())
        return message

    grid.push_messages, grid.tamper = sent, came
    changes = {"strategy": "heterofl", "fleet": "", "evaluate_every": 1, "personal__every": 1}
    [*records] = read_rounds(run(grid, small_config(tmp_path, **NORMED | changes)))
    trained, statistics = (
        [sum(getattr(r, f"{purpose}_bytes_{way}") for r in records) for way in ("down", "up")]
        for purpose in ("training", "statistics")
    )
    assert min(*trained, *statistics) > 0
    assert [down["train"], up["train"]] == [trained[0] + statistics[0], trained[1] + statistics[1]]
    assert down["evaluate"] == sum(r.scoring_bytes_down for r in records) > 0
    assert up["evaluate"] == 0
