"""docs/flower.md: its code runs, and does what the page says."""

import re
from pathlib import Path

from flwr.app import Context, RecordDict

from tests.small_run import same_bits, simulated_grid, small_config
from wildflower.server_app import checkpoint
from wildflower.server_app.app import run
from wildflower.server_app.inputs import run_folder

PAGE = (Path(__file__).parents[2] / "docs/flower.md").read_text()
SERVER_APP, RESUMED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_server_app_runs(tmp_path, capsys):
    config = small_config(tmp_path, rounds=2, evaluate_every=2)
    code = {}
    exec(SERVER_APP, code)
    code["app"](simulated_grid(), Context(1, 0, {}, RecordDict(), config.to_dict()))
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(r"\{2: .*'accuracy': [\d.]+.*'loss': [\d.]+", line)


def test_a_run_of_ours_goes_on_in_flowers_loop(tmp_path):
    config = small_config(tmp_path, rounds=2, evaluate_every=2)
    run(simulated_grid(), config)
    code = {}
    exec(SERVER_APP + RESUMED, code)
    longer = config.model_copy(update={"rounds": 3})
    strategy = code["resumed"](longer)
    strategy.start(simulated_grid(), strategy.arrays, num_rounds=1)
    assert [result.record["round"] for result in strategy.results] == [3]

    run(simulated_grid(), longer.model_copy(update={"resume": True}))
    assert same_bits(checkpoint.load(run_folder(config)).state.tensors, strategy.engine.state().tensors)
