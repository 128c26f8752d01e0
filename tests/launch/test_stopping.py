"""What is started with a run is stopped with it, and in which order."""

from types import SimpleNamespace

from wildflower.launch import superlink


def test_an_app_is_told_to_end_before_the_superlink_that_it_talks_to(tmp_path, monkeypatch):
    """Else it would take the end of its SuperLink for a fault, and write its run down as failed."""
    started = {"superlink": 10.0, "executor": 20.0, "app": 30.0}
    processes = [SimpleNamespace(name=name, create_time=lambda at=at: at) for name, at in started.items()]
    told: list[str] = []
    monkeypatch.setattr(superlink, "_ours", lambda *_: processes)
    monkeypatch.setattr(superlink, "_running", lambda *_: [])
    monkeypatch.setattr(superlink, "_signal", lambda process, number: told.append(process.name))
    monkeypatch.setattr(superlink.psutil, "wait_procs", lambda *_, **__: None)
    superlink.stop_everything([], tmp_path)
    assert told == ["app", "executor", "superlink"]
