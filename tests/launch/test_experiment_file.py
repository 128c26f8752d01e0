import math
import tomllib
from datetime import datetime
from pathlib import Path

import pytest

from wildflower.launch.experiment_file import (
    SettingsError,
    beside,
    cpu_cores,
    parse_override,
    place,
    read_experiment,
    resolve,
    write_toml,
)

NOW = datetime(2026, 3, 4, 5, 6, 7)


def experiment(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_file_and_set_lie_over_the_defaults_with_their_sources(tmp_path):
    path = experiment(
        tmp_path, 'rounds = 7\nlearning-rate = 1\nstrategy = "fedprox"\nworkers = 3\n[fedprox]\nmu = 0.5\n'
    )
    settings = resolve(path, ["rounds=9", "run-name=mine"])
    values = settings.config.to_dict()
    assert (values["rounds"], values["learning-rate"], values["fedprox.mu"], values["run-name"]) == (
        9,
        1.0,
        0.5,
        "mine",
    )
    assert settings.sources["rounds"] == "--set"
    assert settings.sources["fedprox.mu"] == str(path)
    assert settings.sources["seed"] == "default"
    assert settings.sources["workers"] == str(path)
    assert settings.sources.keys() == values.keys()


def test_a_list_is_taken_from_a_file_and_from_the_command(tmp_path):
    path = experiment(tmp_path, "widths = [1, 0.5]\nschedule.decay-rounds = [3, 5]\n")
    assert resolve(path, []).config.widths == (1.0, 0.5)
    assert resolve(path, []).config.schedule.decay_rounds == (3.0, 5.0)
    assert resolve(None, ["widths=[1,0.25]"]).config.widths == (1.0, 0.25)


def test_workers_come_from_the_machine_unless_they_are_given():
    settings = resolve(None, ["devices=50"])
    assert settings.config.workers == min(cpu_cores(), 50)
    assert settings.sources["workers"] == "this machine"
    assert resolve(None, ["devices=1", "devices-per-round=1"]).config.workers == 1
    assert resolve(None, ["workers=5"]).config.workers == 5


def test_an_unknown_key_is_named_with_its_place_and_the_nearest_key(tmp_path):
    path = experiment(tmp_path, "learnin-rate = 0.1\n")
    with pytest.raises(SettingsError) as error:
        resolve(path, [])
    for part in (str(path), "'learnin-rate'", "'learning-rate'"):
        assert part in str(error.value)
    with pytest.raises(SettingsError, match="'heterofl'"):
        resolve(None, ["strategy=hetrofl"])


def test_an_experiment_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        read_experiment(tmp_path / "nowhere.toml")
    with pytest.raises(SettingsError, match="is not TOML"):
        read_experiment(experiment(tmp_path, "rounds 5"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds=5", ("rounds", 5)),
        ("alpha = 0.5", ("alpha", 0.5)),
        ("resume=true", ("resume", True)),
        ("run-name=first try", ("run-name", "first try")),
        ('run-name="first try"', ("run-name", "first try")),
        ("run-name=5", ("run-name", "5")),
        ("run-name=a=b", ("run-name", "a=b")),
        ("run-name=", ("run-name", "")),
        ("rounds=many", ("rounds", "many")),
    ],
)
def test_parse_override(text, expected):
    assert parse_override(text, {"run-name": "", "rounds": 20, "alpha": 0.1, "resume": False}) == expected


@pytest.mark.parametrize("text", ["rounds", "=5", ""])
def test_an_override_needs_a_key_and_a_value(text):
    with pytest.raises(SettingsError, match="key=value"):
        parse_override(text, {})


def test_relative_paths_mean_where_the_command_was_typed(tmp_path):
    config = resolve(None, ["output-dir=out", "data-dir=../data", "fleet=my/fleet.toml", "run-name=one"]).config
    placed, run_dir = place(config, tmp_path / "here", NOW)
    assert run_dir == tmp_path / "here" / "out" / "one"
    assert (placed.output_dir, placed.data_dir) == (str(tmp_path / "here" / "out"), str(tmp_path / "data"))
    assert placed.fleet == str(tmp_path / "here" / "my" / "fleet.toml")


def test_bundled_fleets_and_absolute_paths_stay_as_they_are(tmp_path):
    placed, _ = place(resolve(None, ["output-dir=/somewhere", "run-name=one"]).config, tmp_path, NOW)
    assert (placed.fleet, placed.output_dir) == ("digits-demo", "/somewhere")


def test_a_run_without_a_name_gets_one_that_is_free(tmp_path):
    config = resolve(None, []).config
    placed, run_dir = place(config, tmp_path, NOW)
    assert placed.run_name == run_dir.name == "heterofl-digits-20260304-050607"
    run_dir.mkdir(parents=True)
    assert place(config, tmp_path, NOW)[0].run_name == "heterofl-digits-20260304-050607-2"


def test_resume_needs_a_name(tmp_path):
    with pytest.raises(SettingsError, match="run-name"):
        place(resolve(None, ["resume=true"]).config, tmp_path, NOW)


def test_written_toml_reads_back_as_it_was():
    values = {"fedprox.mu": 1e-05, "rounds": 3, "resume": False, "run-name": 'quote " \\ \n\x7f\x01 é 😀', "big": 1e16}
    assert tomllib.loads(write_toml(values)) == values


def test_numbers_that_are_not_finite_are_written_as_toml_has_them():
    text = write_toml({"a": math.inf, "b": -math.inf, "c": math.nan})
    assert text == '"a" = inf\n"b" = -inf\n"c" = nan\n'
    assert tomllib.loads(text)["a"] == math.inf


def test_a_tokenizers_folder_is_a_whole_path_and_other_arguments_are_as_they_were(tmp_path):
    (tmp_path / "here" / "my model").mkdir(parents=True)
    given = "tokenizer = 'my model', max_tokens = 9, classes = ['b', \"my model\"], test_share = 0.5"
    config = resolve(None, ["task=text", f"task-arguments={given}"]).config
    placed, _ = place(config, tmp_path / "here", NOW)
    assert tomllib.loads(f"a = {{{placed.task_arguments}}}")["a"] == {
        "tokenizer": f"{tmp_path}/here/my model",
        "max_tokens": 9,
        "classes": ["b", "my model"],
        "test_share": 0.5,
    }
    elsewhere, _ = place(config, tmp_path, NOW)
    assert elsewhere.task_arguments == given


def test_a_folder_that_is_called_as_a_column_is_changes_no_argument(tmp_path):
    for name in ("kind", "test.csv", "length"):
        (tmp_path / name).mkdir()
    given = "columns = ['length', 'width'], label = 'kind', test = 'test.csv'"
    config = resolve(None, ["task=table", f"task-arguments={given}"]).config
    assert place(config, tmp_path, NOW)[0].task_arguments == given


def test_tables_of_methods_beside_an_experiment_are_left_out_where_another_method_runs(tmp_path):
    for name in ("soft", "very_soft"):
        (tmp_path / f"{name}.py").write_text(
            "from wildflower.strategies.fedprox import FedProx, FedProxParams\n\n\n"
            "class SoftParams(FedProxParams):\n    pass\n\n\n"
            "class Soft(FedProx):\n    params_type = SoftParams\n"
        )
    tables = "[soft]\nmu = 0.25\n[very-soft]\nmu = 0.5\n"
    path = experiment(tmp_path, f'strategy = "fedavg"\n{tables}')
    with beside(path):
        for strategy, kept in (("fedavg", {}), ("very_soft:Soft", {"very-soft.mu": 0.5})):
            values = resolve(path, [f"strategy={strategy}"]).config.to_dict()
            assert {key: value for key, value in values.items() if "soft" in key} == kept
        with pytest.raises(SettingsError, match=r"very-soft\.nu"):
            resolve(path, ["strategy=very_soft:Soft", "very-soft.nu=1"])
    (tmp_path / "fedprox.py").write_text("")  # which hides nothing of the project's
    for strategy, table in (("fedavg", "sofd"), ("soft:Soft", "soft"), ("fedprox", "fedprox")):
        path = experiment(tmp_path, f'strategy = "{strategy}"\n[{table}]\nnu = 0.25\n')
        with beside(path), pytest.raises(SettingsError, match=rf"{table}\.nu"):
            resolve(path, [])


def test_keys_of_a_files_own_method_are_left_out_where_another_method_runs(tmp_path):
    (tmp_path / "soft.py").write_text(
        "from wildflower.strategies.fedprox import FedProx, FedProxParams\n\n\n"
        "class SoftParams(FedProxParams):\n    pass\n\n\n"
        "class Soft(FedProx):\n    params_type = SoftParams\n"
    )
    path = experiment(tmp_path, 'strategy = "soft:Soft"\n[soft]\nmu = 0.25\n[fedprox]\nmu = 0.5\n')
    with beside(path):
        assert resolve(path, []).config.to_dict()["soft.mu"] == 0.25
        values = resolve(path, ["strategy=fedprox"]).config.to_dict()
    assert values["fedprox.mu"] == 0.5
    assert "soft.mu" not in values


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_text("rounds = 7\n", encoding="utf-8-sig")
    assert read_experiment(path) == {"rounds": 7}
    path.write_text("rounds = 7\n", encoding="utf-16")
    with pytest.raises(SettingsError, match=r"marked\.toml is not in UTF-8 \(byte 1\): save it so"):
        read_experiment(path)
