"""Trackers by their real libraries, offline: MLflow in a database file, Weights & Biases in its offline mode.

Not part of `make test`, whose environment has neither. Where both are installed:
pytest -p no:cacheprovider tests/server_app/with_trackers.py
"""

import json

import mlflow
import wandb  # noqa: F401

from tests.server_app.fake_runs import CONFIG, a_device, a_round
from tests.server_app.test_trackers import Tracked


def tracked(run_dir, tracker):
    """Two rounds, a break, and a third one."""
    config = CONFIG | {"tracker": tracker} | {f"key-{number}": number for number in range(150)}
    journal = Tracked(run_dir, config, resume=False)
    journal.write_round(a_round(1, score_by_tier={"a:b, c": 0.5}), [a_device(1, 0)])
    journal.write_round(a_round(2), [a_device(2, 0)])
    journal.finish("failed", "a fault")
    journal = Tracked(run_dir, config, resume=True)
    journal.write_round(a_round(3), [a_device(3, 0)])
    journal.finish("finished")


def test_mlflow(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked(tmp_path / "one", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("wildflower")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.params["key-149"] == "149"
    history = client.get_metric_history(run.info.run_id, "delivered_accuracy")
    assert [(metric.step, round(metric.value, 6)) for metric in history] == [(1, 0.08), (2, 0.16), (3, 0.24)]
    assert run.data.metrics["accuracy_by_tier/a_b_ c"] == 0.5
    assert "takes no more figures" not in caplog.text


def test_wandb(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked(tmp_path / "one", "wandb")
    files = list((tmp_path / "one/wandb").glob("offline-run-*/run-*.wandb"))
    name = json.loads((tmp_path / "one/tracker.json").read_text())["wandb"]
    assert len(files) == 2
    assert all(file.name == f"run-{name}.wandb" for file in files)
    assert any(b"delivered_accuracy" in file.read_bytes() for file in files)
    assert "takes no more figures" not in caplog.text
