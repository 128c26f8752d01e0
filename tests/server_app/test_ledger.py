"""The ledger of a private run: what counts where rounds are done again, and where the file is not what it was."""

import json
import os
import re
import shutil
import stat

import numpy as np
import pytest
import torch
from fake_runs import a_device, a_round

from tests.small_run import connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.rounds.flower_strategy import FlowerStrategy
from wildflower.server_app import checkpoint, ledger, summary
from wildflower.server_app.app import run
from wildflower.server_app.compare import compare
from wildflower.server_app.journal import Journal
from wildflower.server_app.report import write_report
from wildflower.server_app.run_folder import JournalError, read_rounds, read_summary
from wildflower.strategies import private_mean as of_privacy
from wildflower.strategies.privacy import Account, BudgetSpentError, Privacy, Release, epsilon_after, epsilon_of
from wildflower.strategies.private_mean import PrivateMean

PRIVATE = {
    "strategy": "fedavg",
    "family-arguments": "norm = 'static'",
    "dp.noise-multiplier": 1.0,
    "dp.clip": 0.5,
    "dp.delta": 1e-3,
    "evaluate-every": 9,
    "evaluate-tiers": False,
}
ON_NODES = {"fleet": "", "devices": 2, "devices-per-round": 2}
CONFIG = {"task": "digits", "strategy": "fedavg", "rounds": 9, "seed": 7, "dp.noise-multiplier": 1.0, "fleet": "one"}
VALUES = {"a": torch.tensor([10.0, 20.0])}


def a_privacy(seeded=False, budget=0.0):
    return Privacy(1.0, 1.0, 1e-3, 0.5, 4, seeded, budget)


def a_mean(privacy, number, change=0.0):
    """What becomes of VALUES in a round to which one device came."""
    mean = PrivateMean(VALUES, privacy, [], lambda: number, lambda *numbers: np.random.default_rng([7, *numbers]))
    mean._totals["a"] = torch.tensor([round(change * of_privacy.UNIT * of_privacy.SCALE), 0])
    return mean.mean(VALUES)["a"]


def resumed(folder, seeded=False):
    """The account of a process that goes on with a run."""
    privacy = a_privacy(seeded)
    ledger.keep(privacy, folder)
    return privacy


def with_rounds(folder, rounds, **config):
    """The folder of a private run with so many rounds, whose ledger has as many releases."""
    ledger.begin(folder)
    privacy = resumed(folder)
    journal = Journal.open(folder, CONFIG | config, resume=False)
    for number in range(1, rounds + 1):
        a_mean(privacy, number)
        told = {"epsilon": privacy.account.epsilon(), "delta": 1e-3, "noised_releases": len(privacy.account.releases)}
        journal.write_round(a_round(number, strategy="fedavg", **told), [a_device(number, 0)])
    return journal


def test_the_line_is_on_the_disk_before_there_is_a_model(tmp_path, monkeypatch):
    ledger.begin(tmp_path)
    privacy, synced = resumed(tmp_path), []
    sync = os.fsync
    monkeypatch.setattr(ledger.os, "fsync", lambda file: (synced.append(file), sync(file)))
    drawn = []
    gaussian = of_privacy.gaussian

    def draw(*arguments):
        drawn.append((len(synced), len((tmp_path / ledger.FILE).read_text().splitlines())))
        return gaussian(*arguments)

    monkeypatch.setattr(of_privacy, "gaussian", draw)
    a_mean(privacy, 1)
    assert drawn == [(1, 2)]  # one line was synced, the second of the file


@pytest.mark.parametrize(
    "where", ["before the ledger", "after the ledger", "before the journal", "before the checkpoint"]
)
def test_a_kill_at_any_moment_counts_every_model_that_was_made(where, tmp_path, monkeypatch):
    """In round 2 of 3 over real nodes. The models are counted where they are made."""
    models = []
    noised = PrivateMean._noised
    monkeypatch.setattr(PrivateMean, "_noised", lambda *arguments: models.append(1) or noised(*arguments))

    class Killed(BaseException):
        pass

    kills = {
        "before the ledger": (ledger._Written, "append", 2),  # its first line is not written by append
        "after the ledger": (of_privacy.PrivateMean, "_noised", 2),
        "before the journal": (Journal, "write_round", 2),
        "before the checkpoint": (checkpoint, "save", 2),
    }
    owner, name, at = kills[where]
    original, calls = getattr(owner, name), []

    def killed(*arguments, **keywords):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            run(connected_grid(2, tmp_path), small_config(tmp_path, **PRIVATE | ON_NODES, rounds=3))
    folder = tmp_path / "runs" / "small"
    run(connected_grid(2, tmp_path), small_config(tmp_path, **PRIVATE | ON_NODES, rounds=3, resume=True))
    made = 3 + (where in ("before the journal", "before the checkpoint"))
    assert len(models) == made
    counted = 3 if where == "before the ledger" else 4  # where the ledger has it, it may have been given out
    found = read_summary(folder)
    assert found.noised_releases == counted >= made
    assert found.epsilon == pytest.approx(epsilon_after(counted, 1.0, 1.0, 1e-3))
    assert read_rounds(folder)[-1].epsilon == found.epsilon


@pytest.mark.parametrize("asked_for", [False, True])
def test_what_a_fallback_to_an_earlier_checkpoint_costs_is_told_everywhere(asked_for, tmp_path, caplog):
    """Where the newest ones are damaged, and where somebody goes back by checkpoints.resume-from."""
    config = small_config(tmp_path, **PRIVATE | ON_NODES, rounds=4)
    folder = run(connected_grid(2, tmp_path), config)
    assert read_summary(folder).noised_releases == 4
    again = {"resume": True, "checkpoints": {"resume-from": 2 if asked_for else 0}}
    for number in () if asked_for else (3, 4):
        (folder / "checkpoint" / f"round-{number}" / "SHA256SUMS").write_text("")
    run(connected_grid(2, tmp_path), small_config(tmp_path, **PRIVATE | ON_NODES | again, rounds=4))
    expected = epsilon_after(6, 1.0, 1.0, 1e-3)
    told = "goes on with round 3 and has released 2 noised models more than rounds before it: epsilon 8.416"
    assert told in caplog.text
    found = read_summary(folder)
    assert (found.rounds, found.noised_releases) == (4, 6)
    assert found.epsilon == pytest.approx(expected)
    rounds = read_rounds(folder)
    assert [r.noised_releases for r in rounds] == [1, 2, 5, 6]
    assert rounds[3].epsilon == pytest.approx(expected)
    assert "of 6 noised models" in (folder / "report.html").read_text()
    [table] = [table for table in compare([folder]).tables if table.title == "Privacy"]
    assert table.rows == [["fedavg", f"{expected:.3g}", "0.001", "6 in 4 rounds"]]
    assert stat.S_IMODE((folder / ledger.FILE).stat().st_mode) == 0o600


def test_a_simulation_that_does_rounds_again_has_the_same_bits_and_costs_no_more(tmp_path):
    states = []
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        config = small_config(tmp_path / name, **PRIVATE, rounds=3)
        folder = run(simulated_grid(), config)
        if name == "broken":
            (folder / "checkpoint" / "round-3" / "SHA256SUMS").write_text("")
            run(simulated_grid(), config.model_copy(update={"resume": True}))
        states.append(checkpoint.load(folder).state.tensors)
        assert read_summary(folder).noised_releases == 3
    assert same_bits(*states)


def test_the_same_noise_never_hides_two_sums(tmp_path):
    """The difference of both models would be that of the sums, without noise."""
    ledger.begin(tmp_path)
    first = a_mean(resumed(tmp_path, seeded=True), 1, change=0.5)
    again = a_mean(resumed(tmp_path, seeded=True), 1, change=0.5)
    assert torch.equal(first, again)
    privacy = resumed(tmp_path, seeded=True)
    assert len(privacy.account.releases) == 1
    other = a_mean(privacy, 1, change=-0.5)
    assert abs(float(first[1] - other[1])) > 1e-3  # a coordinate that no device changed: the noise is another
    assert len(privacy.account.releases) == 2
    # Each of both is drawn again by who does the round once more with the same survivors.
    for change, model in ((0.5, first), (-0.5, other)):
        privacy = resumed(tmp_path, seeded=True)
        assert torch.equal(a_mean(privacy, 1, change=change), model)
        assert len(privacy.account.releases) == 2


def test_two_looks_at_one_sample_cost_more_than_two_samples():
    """Both looks are at the same devices, so that sampling hides them once."""
    twice = [Release(1, 1, 1.0, 0.1, digest) for digest in ("a", "b")]
    account = Account(1e-3)
    account.releases = twice
    assert account.epsilon() == pytest.approx(epsilon_after(1, 1 / 2**0.5, 0.1, 1e-3))
    assert account.epsilon() > epsilon_after(2, 1.0, 0.1, 1e-3)
    account.releases = [Release(1, 1, 1.0, 0.1), Release(1, 1, 1.0, 0.1), Release(2, 1, 2.0, 0.1)]
    assert account.epsilon() == pytest.approx(epsilon_of(((1.0, 0.1, 2), (2.0, 0.1, 1)), 1e-3))


def flipped(path):
    content = path.read_bytes()
    place = content.rindex(b'"round": 2') + len(b'"round": ')
    path.write_bytes(content[:place] + b"3" + content[place + 1 :])


def without_line(number):
    def change(path):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))

    return change


DAMAGES = {
    "missing": (os.unlink, "ledger.jsonl is missing: without it nobody knows what the run has released"),
    "empty": (lambda path: path.write_bytes(b""), "line 1: it has no first line"),
    "a digit": (flipped, "line 3: its hash is not that of its content"),
    "no first line": (without_line(0), "line 1: its hash is not"),
    "no middle line": (without_line(2), "line 3: its hash is not"),
    "no last line": (without_line(3), "line 3: rounds.jsonl tells of 3 noised models, and the ledger of 2"),
    "no JSON": (lambda path: path.write_bytes(b"x\n" + path.read_bytes()), "line 1: .*The ledger counts"),
    "a number": (lambda path: path.write_bytes(b"3\n" + path.read_bytes()), "line 1: .*The ledger counts"),
    "no hash": (lambda path: path.write_bytes(b"{}\n" + path.read_bytes()), "line 1: it has no hash"),
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "rounds.jsonl tells of 3 noised models"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_ledger_that_is_not_what_it_was_is_refused_in_words(damage, tmp_path):
    with_rounds(tmp_path, 3).finish("finished")
    change, why = DAMAGES[damage]
    change(tmp_path / ledger.FILE)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(JournalError, match=why):
        Journal.open(tmp_path, CONFIG, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before
    for read in (lambda: summary.summarize(tmp_path, "unfinished", None), lambda: resumed(tmp_path)):
        with pytest.raises(JournalError, match=why):
            read()
    with pytest.raises(JournalError, match=why):
        write_report(tmp_path)
    with pytest.raises(JournalError, match=f"is broken: .*{why}"):
        compare([tmp_path])


def test_a_release_that_the_journal_tells_of_may_not_be_missing(tmp_path):
    """The ledger has every round, and not the one that was done again."""
    journal = with_rounds(tmp_path, 2)
    a_mean(resumed(tmp_path), 3)
    journal.write_round(a_round(3, noised_releases=4, epsilon=3.0, delta=1e-3), [a_device(3, 0)])
    with pytest.raises(JournalError, match=r"rounds\.jsonl tells of 4 noised models, and the ledger of 3"):
        resumed(tmp_path)


@pytest.mark.parametrize(("seeded", "counted"), [(False, 3), (True, 2)])
def test_a_line_that_a_power_cut_tore_counts_where_its_model_may_be_known(seeded, counted, tmp_path):
    """The journal lacks the round. In a simulation it is done again with the same noise."""
    with_rounds(tmp_path, 2)
    path = tmp_path / ledger.FILE
    whole = path.read_bytes()
    a_mean(resumed(tmp_path), 3)
    path.write_bytes(path.read_bytes()[:-20])
    privacy = resumed(tmp_path, seeded)
    assert len(privacy.account.releases) == counted
    assert path.read_bytes().startswith(whole)
    a_mean(privacy, 3)
    assert len(resumed(tmp_path, seeded).account.releases) == counted + 1


def test_a_run_ends_before_the_round_that_would_exceed_its_budget(tmp_path):
    config = small_config(tmp_path, **PRIVATE | ON_NODES | {"dp.noise-multiplier": 0.0, "dp.epsilon": 5.0}, rounds=3)
    folder = run(connected_grid(2, tmp_path), config)
    once = read_summary(folder).epsilon
    assert 4.9 < once <= 5.0
    (folder / "checkpoint" / "round-3" / "SHA256SUMS").write_text("")
    with pytest.raises(
        BudgetSpentError, match=r"dp\.epsilon = 5 is spent: the ledger counts 3 noised models of 3 rounds"
    ):
        run(connected_grid(2, tmp_path), config.model_copy(update={"resume": True}))
    found = read_summary(folder)
    assert (found.status, found.rounds, found.epsilon) == ("failed", 2, once)
    assert re.search(r"with that of round 3 it would be [5-9]", found.error)
    assert len((folder / ledger.FILE).read_text().splitlines()) == 4


def test_a_release_beyond_the_budget_is_refused_also_within_a_round(tmp_path):
    ledger.begin(tmp_path)
    privacy = a_privacy(budget=epsilon_after(2, 1.0, 0.5, 1e-3))
    ledger.keep(privacy, tmp_path)
    for number in (1, 2):
        privacy.check_room(number)
        a_mean(privacy, number)
    for refused in (lambda: privacy.check_room(3), lambda: a_mean(privacy, 3)):
        with pytest.raises(BudgetSpentError, match="counts 2 noised models of 2 rounds"):
            refused()
    assert len((tmp_path / ledger.FILE).read_text().splitlines()) == 3


def test_a_simulation_within_its_budget_may_do_its_last_round_again():
    privacy = a_privacy(seeded=True, budget=epsilon_after(1, 1.0, 0.5, 1e-3))
    a_mean(privacy, 1)
    privacy.check_room(1)
    with pytest.raises(BudgetSpentError):
        privacy.check_room(2)


def test_a_copy_of_a_run_goes_on_only_if_somebody_says_that_it_is_the_only_one(tmp_path):
    on_nodes = {"fleet": ""}
    with_rounds(tmp_path / "here", 2, **on_nodes)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    Journal.open(tmp_path / "here", CONFIG | on_nodes, resume=True)
    with pytest.raises(JournalError, match=r"the folder was copied, .* say so by dp.resume-copy=true"):
        Journal.open(tmp_path / "there", CONFIG | on_nodes, resume=True)
    Journal.open(tmp_path / "there", CONFIG | on_nodes | {"dp.resume-copy": True}, resume=True)
    resumed(tmp_path / "there")
    Journal.open(tmp_path / "there", CONFIG | on_nodes, resume=True)  # it is this run's file from now on
    (tmp_path / "there").rename(tmp_path / "moved")
    Journal.open(tmp_path / "moved", CONFIG | on_nodes, resume=True)


def test_copies_of_a_simulation_release_the_same(tmp_path):
    with_rounds(tmp_path / "here", 2)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    Journal.open(tmp_path / "there", CONFIG, resume=True)


def test_a_run_that_has_released_something_is_not_begun_anew(tmp_path):
    """Without a checkpoint another run may take the name, unless its first model is known."""
    with_rounds(tmp_path, 1)
    with pytest.raises(JournalError, match="already holds an unfinished run"):
        Journal.open(tmp_path, CONFIG, resume=False)
    for name in ("config.json", "rounds.jsonl"):
        (tmp_path / name).unlink()
    ledger.begin(tmp_path)
    assert len(resumed(tmp_path).account.releases) == 1


def test_a_run_without_differential_privacy_has_no_ledger(tmp_path):
    folder = run(simulated_grid(), small_config(tmp_path, rounds=1))
    assert not (folder / ledger.FILE).exists()
    found = json.loads((folder / "summary.json").read_text())
    assert (found["epsilon"], found["noised_releases"]) == (None, None)


def test_flowers_loop_does_not_go_on_without_the_ledger(tmp_path, caplog):
    engine, _ = started(small_config(tmp_path, **PRIVATE))
    with pytest.raises(ValueError, match=r"2 rounds .* wildflower\.server_app\.ledger\.keep"):
        FlowerStrategy(engine, rounds_done=2)
    FlowerStrategy(engine)
    assert "Noised models are written to no ledger: call wildflower.server_app.ledger.begin and keep" in caplog.text
    engine.settings.privacy.account.releases = [Release(1, 1, 1.0, 0.5), Release(2, 1, 1.0, 0.5)]
    FlowerStrategy(engine, rounds_done=2)
