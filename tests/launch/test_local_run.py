"""What a run on own workers needs of the command's process."""

import logging
import os

import pytest

from wildflower.launch.forked_server import prepare_to_fork, told_later

log = logging.getLogger("flwr")


def test_what_is_said_while_a_run_is_built_is_held_back(caplog):
    with told_later() as records:
        log.warning("%s texts are cut", 3)
    assert caplog.messages == []
    assert [record.getMessage() for record in records] == ["3 texts are cut"]
    log.warning("afterwards")
    assert caplog.messages == ["afterwards"]


def test_what_was_said_comes_where_the_run_cannot_be_built(caplog):
    def build():
        log.warning("texts are cut")
        raise ValueError("no family")

    with pytest.raises(ValueError, match="no family"), told_later():
        build()
    assert caplog.messages == ["texts are cut"]


def test_threads_are_one_unless_somebody_wants_more(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    prepare_to_fork()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("1", "4")
