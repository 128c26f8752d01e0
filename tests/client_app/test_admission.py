import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from flwr.supercore.retry import make_simple_http_retry_invoker

from wildflower.client_app.admission import (
    HOLD,
    LEASE_SECONDS,
    NO_LONGER,
    NO_MORE,
    REFUSED,
    UNREACHABLE,
    leaving_in_words,
    noticing,
    tell_watchdog,
    waiting_for_lease,
)


def error(status):
    request = httpx.Request("POST", "https://server/v1/fleet/activate-node")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


@pytest.fixture
def stopped(monkeypatch):
    """The signals that this process is sent, which go nowhere."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number) if pid == os.getpid() else None)
    return sent


def activation(*answers):
    """The server's answers one after the other: a value, or an error; how often it was asked."""
    left, asked = list(answers), []

    def activate(request):
        asked.append(request)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return activate, asked


def test_a_node_that_was_killed_waits_for_the_end_of_its_lease(capsys):
    activate, asked = activation(error(412), error(412), "let in")
    slept, ends = [], []
    assert waiting_for_lease(activate, ends, slept.append)("request") == "let in"
    assert asked == ["request"] * 3
    assert (slept, ends) == ([15, 15], [])
    assert capsys.readouterr().err.count("the server holds its place until the lease ends") == 1


def test_a_key_that_is_refused_for_longer_than_a_lease_ends_the_node(capsys, monkeypatch, stopped):
    monkeypatch.setenv(HOLD, "3600")
    activate, _ = activation(error(412))
    slept, ends = [], []
    with pytest.raises(SystemExit) as ended:
        waiting_for_lease(activate, ends, slept.append)("request")
    assert (ended.value.code, ends, stopped) == (REFUSED, [REFUSED], [signal.SIGTERM])
    assert sum(slept[:-1]) == LEASE_SECONDS
    assert slept[-1] == 3600
    assert "never enrolled, it was revoked" in capsys.readouterr().err


@pytest.mark.parametrize("other", [error(500), httpx.ConnectError("refused")])
def test_other_errors_are_flowers(other):
    activate, asked = activation(other)
    with pytest.raises(type(other)):
        waiting_for_lease(activate, [], lambda seconds: pytest.fail("it waits"))("request")
    assert len(asked) == 1


def test_a_key_that_is_revoked_at_work_is_told_once(capsys):
    retries = make_simple_http_retry_invoker()
    retries.should_giveup = lambda error: True
    ends = []
    gives_up = noticing(retries, ends).should_giveup
    assert gives_up(error(500))
    assert ends == []
    assert gives_up(error(401))
    assert gives_up(error(401))
    assert ends == [NO_MORE]
    assert capsys.readouterr().err == f"ERROR: {NO_LONGER}\n"


def left_with(error):
    """The code with which a node ends whose connection failed with an error."""

    def flowers(code):
        raise SystemExit(1)

    try:
        raise error
    except httpx.HTTPError:
        with pytest.raises(SystemExit) as ended:
            leaving_in_words(flowers, "fl.example:8000", [])(305)
    return ended.value.code


def test_a_server_that_cannot_be_reached_has_a_code_of_its_own(capsys, stopped):
    assert left_with(httpx.ConnectError("Connection refused")) == UNREACHABLE
    assert "the server fl.example:8000 cannot be reached: Connection refused" in capsys.readouterr().err
    assert stopped == [signal.SIGTERM]
    assert left_with(error(500)) == 1
    assert capsys.readouterr().err == ""


def test_systemds_watchdog_hears_that_a_node_is_alive(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    tell_watchdog()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        tell_watchdog()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_units_do_not_start_a_refused_node_again():
    board = (Path(__file__).parents[2] / "deploy" / "board.sh").read_text()
    assert f"RestartPreventExitStatus={REFUSED}\n" in board
