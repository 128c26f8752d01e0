"""Models are saved exactly as they were scored, and come back so."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_runs import CONFIG

from tests.small_run import METHODS, by_method, connected_grid, simulated_grid, small_config
from wildflower.models.architecture import Architecture
from wildflower.models.network import lighten
from wildflower.rounds.evaluation import Scores
from wildflower.server_app import building
from wildflower.server_app.app import build, run
from wildflower.server_app.journal import Journal
from wildflower.server_app.models import ModelError, ModelInfo, drop_models_after, load_model, save_models
from wildflower.server_app.run_folder import read_rounds
from wildflower.server_app.server_scoring import SCORED_TOGETHER
from wildflower.tasks.scoring import score
from wildflower.tasks.task import TaskSpec, load_task

ON_DEVICES = ("local", "recipfl", "spatl")
TIERS_ON_DEVICES = ("rafl", "rafl ensemble")
LEARNING = {"rounds": 1, "evaluate-every": 1, "evaluate-tiers": True, "local-steps": 10, "examples-per-device": 200}


def task_of(config):
    return load_task(TaskSpec.from_json(build(config)[0].settings.task))


def by_hand(model, info, task):
    """Accuracy in plain PyTorch and with nothing but what was saved; an image by itself is as it is among others."""
    mean, std = torch.tensor(info.mean).view(-1, 1, 1), torch.tensor(info.std).view(-1, 1, 1)
    images = (task.test.inputs.float() - mean).div(std)
    with torch.no_grad():
        said = model(images).argmax(dim=1)
        alone = torch.cat([model(image.unsqueeze(0)).argmax(dim=1) for image in images[:40]])
    assert torch.equal(said[:40], alone)
    return int((said == task.test.labels).sum()) / len(said)


# FedNAS is scored as FedAvg is, and its search network takes long over single images.
@by_method(method for method in METHODS if method not in (*ON_DEVICES, "fednas"))
def test_a_saved_model_says_image_by_image_what_was_scored(method, tmp_path):
    config = small_config(tmp_path, **METHODS[method] | LEARNING)
    run_dir = run(simulated_grid(), config)
    task, [record] = task_of(config), read_rounds(run_dir)
    model, info = load_model(run_dir)
    assert info.model.is_global
    assert by_hand(model, info, task) == info.model.score == record.score
    assert record.score_by_tier
    for tier, accuracy in record.score_by_tier.items():
        if method in TIERS_ON_DEVICES:
            assert tier not in info.model.tiers
            continue
        model, info = load_model(run_dir, "newest", tier)
        assert tier in info.model.tiers
        assert by_hand(model, info, task) == info.model.score == accuracy


@pytest.mark.thorough
def test_heterofls_statistics_are_in_the_file(tmp_path):
    config = small_config(tmp_path, **LEARNING | {"rounds": 6, "local-steps": 20})
    run_dir = run(simulated_grid(), config)
    model, _ = load_model(run_dir, "newest")
    assert any(name.endswith("running_var") for name in model.state_dict())
    assert not model.training
    record, task = read_rounds(run_dir)[-1], task_of(config)
    inputs, labels = task.test.inputs, task.test.labels
    [correct], loss, n, _ = score(model, task, inputs, labels, batch_size=SCORED_TOGETHER, device=torch.device("cpu"))
    assert correct / n == record.score
    assert loss / n == pytest.approx(record.loss, rel=1e-6)
    lighten(model)  # as the server does, which leaves its bits
    [correct], loss, n, _ = score(model, task, inputs, labels, batch_size=SCORED_TOGETHER, device=torch.device("cpu"))
    assert (correct / n, loss / n) == (record.score, record.loss)
    assert record.score > 0.5  # it has learned, so that there is something to get wrong


@pytest.mark.thorough
def test_depthfls_exits_speak_together(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, **METHODS["depthfl"] | LEARNING))
    model, info = load_model(run_dir)
    assert info.model.exits == "mean"
    x = info.prepare(torch.randint(0, 17, (3, *info.input_shape), dtype=torch.uint8))
    assert torch.equal(model(x), torch.stack(model.model.exits(x)).mean(0))
    keys = METHODS["depthfl"] | LEARNING | {"depthfl.scored": "deepest", "run-name": "deepest"}
    model, info = load_model(run(simulated_grid(), small_config(tmp_path, **keys)))
    assert info.model.exits == "deepest"
    assert torch.equal(model(x), model.exits(x)[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("method", ON_DEVICES)
def test_models_that_live_on_devices_are_not_written(method, tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, **METHODS[method] | {"rounds": 1, "evaluate-every": 1}))
    assert read_rounds(run_dir)[-1].score is not None
    assert not (run_dir / "models").exists()
    with pytest.raises(ModelError, match="holds no models: they are written when they are scored on the server"):
        load_model(run_dir)


def test_where_no_model_was_ever_written_that_is_said(tmp_path):
    with pytest.raises(ModelError, match=r"there is no folder .*nope$"):
        load_model(tmp_path / "nope")
    with pytest.raises(ModelError, match="is not the folder of a run"):
        load_model(tmp_path)
    journal = Journal.open(tmp_path / "run", CONFIG, resume=False)
    with pytest.raises(ModelError, match="none was ever written, because the run has no evaluation yet"):
        load_model(tmp_path / "run")
    journal.finish("failed", "no memory")
    with pytest.raises(ModelError, match="none was ever written, because the run failed before its first evaluation"):
        load_model(tmp_path / "run")


def test_real_devices_kinds_are_tiers(tmp_path):
    config = small_config(tmp_path, **LEARNING | {"fleet": "", "devices": 3, "devices-per-round": 3, "rounds": 1})
    run_dir = run(connected_grid(3, tmp_path), config)
    [tier] = read_rounds(run_dir)[-1].score_by_tier
    assert load_model(run_dir, tier=tier)[1].model.is_global  # all can afford the whole model


def test_inputs_are_prepared_as_the_task_does(tmp_path):
    config = small_config(tmp_path, rounds=1)
    task, run_dir = task_of(config), run(simulated_grid(), config)
    _, info = load_model(run_dir)
    assert torch.equal(info.prepare(task.test.inputs), task.prepare(task.test.inputs, augment=None))
    assert (info.task, info.classes, info.input_shape) == ("digits", 10, [1, 8, 8])
    tokens = ModelInfo.model_validate(info.model_dump() | {"mean": None, "std": None})
    assert tokens.prepare(torch.tensor([[3, 5]], dtype=torch.uint8)).dtype == torch.int64


def test_there_is_one_file_per_model_and_no_pickle(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, **LEARNING))
    for which in ("newest", "best"):
        folder = run_dir / "models" / which
        value = json.loads((folder / "models.json").read_text())
        files = {model["file"] for model in value["models"]}
        assert {path.name for path in folder.iterdir()} == files | {"models.json"}
        assert "global.safetensors" in files
        assert len(files) == len(value["models"]) == 3
    best, newest, *of_tiers = sorted((run_dir / "models").iterdir())
    assert (best.name, newest.name, len(of_tiers)) == ("best", "newest", 3)
    for folder in of_tiers:
        [model] = json.loads((folder / "models.json").read_text())["models"]
        assert {path.name for path in folder.iterdir()} == {model["file"], "models.json"}


# Newest and best


@pytest.fixture
def accuracies(monkeypatch):
    """Scores as the test wants them, one per evaluation."""
    values = []
    monkeypatch.setattr(building, "scorer", lambda task, held_out: lambda model: Scores(values.pop(0), 1.0))
    return values


def newest_and_best(run_dir):
    return [(info.round, info.model.score) for _, info in (load_model(run_dir, w) for w in ("newest", "best"))]


KEYS = METHODS["all-large"] | {"evaluate-every": 1, "evaluate-tiers": False}


def test_the_best_is_the_earliest_of_the_best_also_after_a_restart(tmp_path, accuracies):
    accuracies += [0.5, 0.75, 0.75]
    run_dir = run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=3))
    assert newest_and_best(run_dir) == [(3, 0.75), (2, 0.75)]
    best = load_model(run_dir, "best")[0].state_dict()

    accuracies += [0.25, 0.75]
    assert run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=5, resume=True)) == run_dir
    assert newest_and_best(run_dir) == [(5, 0.75), (2, 0.75)]
    kept = load_model(run_dir, "best")[0].state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in best.items())

    accuracies += [0.875]
    run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=6, resume=True))
    assert newest_and_best(run_dir) == [(6, 0.875), (6, 0.875)]


def test_rounds_without_evaluation_write_nothing(tmp_path, accuracies):
    accuracies += [0.5]
    run_dir = run(simulated_grid(), small_config(tmp_path, **KEYS | {"evaluate-every": 2}, rounds=2))
    assert newest_and_best(run_dir) == [(2, 0.5), (2, 0.5)]


def test_a_run_whose_models_are_gone_goes_on(tmp_path, accuracies):
    accuracies += [0.75]
    run_dir = run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=1))
    shutil.rmtree(run_dir / "models")
    with pytest.raises(ModelError, match="models on devices never are"):
        load_model(run_dir)
    accuracies += [0.5]
    run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=2, resume=True))
    assert newest_and_best(run_dir) == [(2, 0.5), (2, 0.5)]


def test_a_file_system_with_one_name_per_file_gets_a_copy(tmp_path, accuracies, monkeypatch):
    def no_links(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    accuracies += [0.5, 0.25]
    run_dir = run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=2))
    assert newest_and_best(run_dir) == [(2, 0.25), (1, 0.5)]


def test_a_tiers_best_is_that_of_its_own_score_and_without_one_the_newest(tmp_path):
    keys = LEARNING | {"examples-per-device": 20, "local-steps": 1}
    engine, scorer = build(small_config(tmp_path, **keys))
    engine.run_round(simulated_grid(), 1, scorer)
    task = load_task(TaskSpec.from_json(engine.settings.task))
    by_tier = engine.evaluation.models_of_tiers
    assert by_tier["whole"] == engine.method.scored_architecture
    assert len({*by_tier.values()}) == 3
    for number, (whole, half, quarter) in enumerate([(0.9, 0.45, 0.2), (0.8, 1.0, 0.2), (0.7, 0.6, 0.1)], start=1):
        scores = {by_tier["whole"]: whole, by_tier["half"]: half, by_tier["quarter"]: quarter}
        write(tmp_path, (engine, task), number, scores)

    def found(which, tier):
        model, info = load_model(tmp_path, which, tier)
        assert all(bool((value == info.round).all()) for value in model.state_dict().values())
        return info.round, info.model.score

    assert [found("best", tier) for tier in (None, "whole", "half", "quarter")] == [
        (1, 0.9),
        (1, 0.9),
        (2, 1.0),
        (1, 0.2),
    ]
    assert found("newest", "half") == (3, 0.6)
    assert found("best", None) == (1, 0.9)


# Crashes


class Crash(BaseException):
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An engine whose models have been scored, and its task."""
    folder = tmp_path_factory.mktemp("trained")
    engine, scorer = build(small_config(folder, **METHODS["all-large"] | {"evaluate-every": 1, "evaluate-tiers": True}))
    engine.run_round(simulated_grid(), 1, scorer)
    return engine, load_task(TaskSpec.from_json(engine.settings.task))


def write(run_dir, trained, number, scores=None):
    """What round `number` would leave: round and accuracy are `number`, and so is every weight."""
    engine, task = trained
    engine.method.round = number
    for model in engine.evaluation.scored.values():
        for value in model.weights.values():
            value.fill_(number)
    engine.evaluation.model_scores = scores or dict.fromkeys(engine.evaluation.scored, number / 10)
    save_models(run_dir, engine, task)


def rounds_in(run_dir):
    found = []
    for which, tier in (("newest", None), ("best", None), ("best", "half")):
        model, info = load_model(run_dir, which, tier)
        assert info.model.score == info.round / 10
        assert all(bool((value == info.round).all()) for value in model.state_dict().values())
        found.append(info.round)
    return found


def crash_while_writing(run_dir, trained, number, monkeypatch, count):
    """Write, but crash after `count` changes of the file system; false where there were no more."""
    done = []

    def counted(original):
        def step(*arguments, **keywords):
            if len(done) == count:
                raise Crash
            done.append(original)
            return original(*arguments, **keywords)

        return step

    with monkeypatch.context() as patch:
        changes = [(Path, "rename"), (Path, "mkdir"), (Path, "write_text"), (Path, "write_bytes")]
        for owner, name in [*changes, (shutil, "rmtree"), (os, "link")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            write(run_dir, trained, number)
        except Crash:
            return True
    return False


@pytest.mark.thorough
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_models(tmp_path, trained, monkeypatch):
    crashes, seen = 0, set()
    for count in range(100):
        run_dir = tmp_path / f"{count}"
        write(run_dir, trained, 1)
        if not crash_while_writing(run_dir, trained, 2, monkeypatch, count):
            break
        crashes += 1
        newest, best, of_half = rounds_in(run_dir)
        assert of_half <= best <= newest <= 2
        seen.add((newest, best, of_half))
        write(run_dir, trained, 3)  # and the run goes on
        assert rounds_in(run_dir) == [3, 3, 3]
    assert 10 <= crashes < 100
    assert seen == {(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)}


def test_an_evaluation_without_the_global_model_is_the_best_only_until_one_has_it(tmp_path):
    """Of two evaluations without it the newer one stays, until the first that has it; none without it comes after."""
    engine, scorer = build(small_config(tmp_path, **METHODS["heterofl"] | {"evaluate-every": 1}))
    engine.run_round(simulated_grid(), 1, scorer)
    task = load_task(TaskSpec.from_json(engine.settings.task))
    of_tiers = {a: model for a, model in engine.evaluation.scored.items() if a != engine.method.scored_architecture}
    tier = next(tier for tier, a in engine.evaluation.models_of_tiers.items() if a in of_tiers)
    best = []
    for number, scored in enumerate([of_tiers, of_tiers, engine.evaluation.scored, of_tiers], start=1):
        with mock.patch.object(engine.evaluation, "scored", scored):
            write(tmp_path, (engine, task), number)
        best.append(json.loads((tmp_path / "models" / "best" / "models.json").read_text())["round"])
    assert best == [1, 2, 3, 3]
    assert load_model(tmp_path, "newest", tier)[1].round == 4
    with pytest.raises(ModelError, match="holds no global model, which could not be scored; of tiers there are"):
        load_model(tmp_path, "newest")


def test_the_best_model_of_a_tier_is_best_on_the_tiers_own_devices(tmp_path, trained):
    """Where devices test, a model that several tiers have is better on some of them than on others."""
    engine, _ = trained
    for number, of_half in ((1, 0.8), (2, 0.6), (3, 0.7)):
        with mock.patch.object(engine.evaluation, "tier_scores", {"half": of_half}):
            write(tmp_path, trained, number)  # over all devices each is better than the one before
    assert (load_model(tmp_path)[1].round, load_model(tmp_path)[1].model.score) == (3, 0.3)
    found = load_model(tmp_path, "best", "half")[1]
    assert (found.round, found.model.score) == (1, 0.8)
    assert load_model(tmp_path, "best", "quarter")[1].round == 3
    # Where no device of the tier has scored it, how others did makes it no tier's best.
    with (
        mock.patch.object(type(engine.evaluation), "tests_on_devices", True),
        mock.patch.object(engine.evaluation, "tier_scores", {"quarter": 0.1}),
    ):
        write(tmp_path, trained, 9)
    assert load_model(tmp_path)[1].round == 9
    assert load_model(tmp_path, "best", "half")[1].round == 1


def test_a_run_that_goes_on_from_a_round_has_no_models_of_later_ones(tmp_path, trained):
    """Scores are the same in both evaluations, so that the best is that of the first."""
    for number in (1, 2):
        write(tmp_path, trained, number, dict.fromkeys(trained[0].evaluation.scored, 0.5))
    drop_models_after(tmp_path, 1)
    assert json.loads((tmp_path / "models" / "best" / "models.json").read_text())["round"] == 1
    assert not (tmp_path / "models" / "newest").exists()
    drop_models_after(tmp_path, 0)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_best_that_cannot_be_read_does_not_stop_a_run(tmp_path, trained):
    write(tmp_path, trained, 2)
    (tmp_path / "models" / "best" / "models.json").write_text("{")
    write(tmp_path, trained, 1)
    assert rounds_in(tmp_path) == [1, 1, 2]


# What is wrong is said


def test_models_that_there_are_not_are_named(tmp_path, trained):
    write(tmp_path, trained, 1)
    tiers = ", ".join(sorted(trained[0].evaluation.scored_tiers))
    with pytest.raises(ModelError, match=f"holds no model of a tier 'huge'; there are {tiers}$"):
        load_model(tmp_path, tier="huge")
    with pytest.raises(ModelError, match="which = 'last': a run has a 'best' and a 'newest' evaluation"):
        load_model(tmp_path, "last")


def test_without_evaluate_tiers_there_is_the_global_model_only(tmp_path, accuracies):
    accuracies += [0.5]
    run_dir = run(simulated_grid(), small_config(tmp_path, **KEYS, rounds=1))
    words = r"a tier 'half'; it has none of any tier: .* \(evaluate-tiers = false\), or its method leaves the models"
    with pytest.raises(ModelError, match=words):
        load_model(run_dir, tier="half")


def test_tiers_whose_models_live_on_devices_are_not_blamed_on_evaluate_tiers_alone(tmp_path):
    run_dir = run(simulated_grid(), small_config(tmp_path, **METHODS["rafl"] | LEARNING | {"local-steps": 1}))
    assert load_model(run_dir)[1].model.is_global
    with pytest.raises(ModelError, match=r"it has none of any tier: .* or its method leaves the models of tiers on"):
        load_model(run_dir, tier="half")


def test_a_changed_file_is_not_loaded(tmp_path, trained):
    write(tmp_path, trained, 1)
    path = tmp_path / "models" / "best" / "global.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # it is the newest's as well
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"global.safetensors is not the file that was written: its sha256"):
        load_model(tmp_path)
    assert load_model(tmp_path, "newest")[1].round == 1
    path.unlink()
    with pytest.raises(ModelError, match="cannot read the model"):
        load_model(tmp_path)


def edited(run_dir, change):
    path = run_dir / "models" / "best" / "models.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: value.pop("round"), "the key 'round' is missing$"),
        (lambda value: value["models"].clear(), "names no model, or several global ones"),
        (
            lambda value: value["models"][0].update(file="../global.safetensors"),
            "models.0.file = .*: must be of the form",
        ),
        (
            lambda value: value["models"][0]["family"].update(name="lenet6"),
            "does not fit .*lenet6",
        ),
        (lambda value: value["models"][0].update(architecture={"widths": [1]}), "does not fit .* 1 widths"),
        (lambda value: value["models"][0]["family"].update(classes=11), "does not fit .*must have the shape .11"),
    ],
)
def test_facts_that_do_not_fit_are_a_clear_error(change, words, tmp_path, trained):
    write(tmp_path, trained, 1)
    edited(tmp_path, change)
    with pytest.raises(ModelError, match=f"(?s){words}"):
        load_model(tmp_path)


def test_an_architecture_comes_back_as_it_was(tmp_path, trained):
    write(tmp_path, trained, 1)
    _, info = load_model(tmp_path)
    assert Architecture.from_json(info.model.architecture) == trained[0].method.scored_architecture
