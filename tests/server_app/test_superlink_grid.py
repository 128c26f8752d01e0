import shutil
import ssl
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import Error, Message, RecordDict
from flwr.superlink.grid.http_grid import HttpGrid

from tests.programs import run_python
from tests.small_run import simulated_grid
from wildflower.rounds.exchange import pull
from wildflower.server_app import superlink_grid
from wildflower.server_app.superlink_grid import SuperLinkError, SuperLinkGrid, database_of


class BrokenGrid:
    """Answers every request as a SuperLink with this status does."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def request(*arguments, **options):
            url = httpx.Request("POST", "https://server/v1/runtime/push-messages")
            httpx.Response(self.status, request=url).raise_for_status()
            return []

        return request


def free(monkeypatch, nbytes):
    monkeypatch.setattr(superlink_grid.shutil, "disk_usage", lambda folder: SimpleNamespace(free=nbytes))


def test_a_database_without_room_is_told_before_anything_is_sent(tmp_path, monkeypatch):
    grid = SuperLinkGrid(simulated_grid(), "one", tmp_path / "state.db")
    nodes = list(grid.get_node_ids())
    free(monkeypatch, 4096)
    requests = [
        grid.get_node_ids,
        grid.get_nodes,
        lambda: grid.push_messages([]),
        lambda: grid.pull_messages([]),
        lambda: grid.send_and_receive([]),
    ]
    for request in requests:
        with pytest.raises(SuperLinkError) as told:
            request()
        text = str(told.value)
        assert f"database {tmp_path / 'state.db'} is full (4.1 kB are free)" in text
        assert "start the SuperLink anew" in text
        assert text.endswith("--set resume=true --set run-name=one")
        assert "\n" not in text
    free(monkeypatch, 10**9)
    assert list(grid.get_node_ids()) == nodes


@pytest.mark.parametrize("database", [True, False])
def test_an_internal_error_of_the_superlink_is_told_and_no_other(tmp_path, database):
    file = tmp_path / "state.db" if database else None
    with pytest.raises(SuperLinkError, match="too little room for a round's messages") as told:
        SuperLinkGrid(BrokenGrid(500), "one", file).push_messages([])
    assert (str(tmp_path) in str(told.value)) == database
    with pytest.raises(httpx.HTTPStatusError):
        SuperLinkGrid(BrokenGrid(401), "one", file).push_messages([])


def test_a_process_of_rays_that_is_gone_ends_a_simulation_and_no_run_on_nodes():
    """Else it would take messages from those that work, and fail them, until the end of the run."""
    flowers = simulated_grid()
    died = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.'>"
    flowers.app = lambda message, context: Message(Error(0, died), reply_to=message)
    for simulated in (False, True):
        grid = SuperLinkGrid(flowers, "one", None, simulated=simulated)
        (asked,) = grid.push_messages([Message(RecordDict(), 1, "query")])
        if not simulated:  # a node may say what it likes
            assert [failure.why for _, failure in pull(grid, {asked: 1})] == [f"Flower error 0: {died}"]
            continue
        with pytest.raises(SuperLinkError, match=r"^A process of Ray's was killed.*resume=true --set run-name=one$"):
            list(pull(grid, {asked: 1}))
        with pytest.raises(SuperLinkError):
            grid.push_messages([])


def test_a_request_is_sent_again_where_the_superlink_closes_a_connection():
    flowers = HttpGrid("127.0.0.1:1", root_certificates=None, token="a token")
    SuperLinkGrid(flowers, "one", None)
    closed = httpx.ReadError("TLS/SSL connection has been closed (EOF)")
    closed.__cause__ = ssl.SSLZeroReturnError("TLS/SSL connection has been closed (EOF)")
    assert not flowers._retry_invoker.should_giveup(closed)
    assert flowers._retry_invoker.should_giveup(httpx.ReadError("[SSL] bad record"))


def test_the_database_is_that_of_the_command_line(tmp_path):
    file = tmp_path / "state" / "s.db"
    file.parent.mkdir()
    shutil.copy(__file__, file)
    begin = ["python3", "/opt/wildflower-superlink", "--host", "0.0.0.0"]
    for words in (
        ["--database", str(file)],
        [f"--database=sqlite:///{file}", "--port=1"],
        ["--database", "state/s.db"],
    ):
        assert database_of([*begin, *words], tmp_path) == file
    for words in ([], ["--database", ":memory:"], ["--database", str(tmp_path)]):
        assert database_of([*begin, *words], tmp_path) is None


@pytest.mark.thorough
def test_the_server_does_not_load_what_the_superlink_itself_needs():
    """It would take 0.8 s at every start."""
    done = run_python(
        "-c", "import sys, wildflower.server_app.app; print({'sqlalchemy', 'alembic', 'fastapi'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr
