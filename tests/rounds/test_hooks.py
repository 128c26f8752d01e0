"""Hooks of users that fail, or do what they may not."""

import json
from dataclasses import replace
from unittest import mock

import pytest

from tests.small_run import simulated_grid, small_config
from wildflower.rounds.hooks import HookError, RoundHook, check_hooks
from wildflower.server_app import checkpoint
from wildflower.server_app.app import build, run
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.inputs import run_folder
from wildflower.server_app.run_folder import read_rounds, read_summary


class Raising(RoundHook):
    def __init__(self, point: str, number: int = 2) -> None:
        self._point, self._number = point, number

    def _at(self, point, round):
        if (self._point, self._number) == (point, round.number):
            raise KeyError("not there")

    def before_assigning(self, round):
        self._at("before_assigning", round)

    def before_sending(self, round):
        self._at("before_sending", round)

    def on_reply(self, round, batch, reply):
        self._at("on_reply", round)

    def before_finishing(self, round):
        self._at("before_finishing", round)

    def after_finishing(self, round):
        self._at("after_finishing", round)

    def at_end(self, round):
        self._at("at_end", round)


@pytest.mark.parametrize(
    "point", ["before_assigning", "before_sending", "on_reply", "before_finishing", "after_finishing", "at_end"]
)
def test_a_hook_that_raises_ends_the_run_and_finished_rounds_stand(tmp_path, point):
    config = small_config(tmp_path, rounds=3)
    with pytest.raises(HookError, match=r"hook Raising: KeyError: 'not there' \(.*test_hooks.py, line \d+\)"):
        run(simulated_grid(), config, build(config, hooks=[Raising(point)]))
    run_dir = run_folder(config)
    summary = read_summary(run_dir)
    assert summary.status == "failed"
    assert summary.error.startswith("hook Raising: KeyError")
    assert "\n" not in summary.error
    # The journal has a round before the hooks see its end; the checkpoint has it when they are done with it.
    assert len(read_rounds(run_dir)) == (2 if point == "at_end" else 1)
    assert checkpoint.load(run_dir).round == 1
    run(simulated_grid(), config.model_copy(update={"resume": True}))
    assert [record.round for record in read_rounds(run_dir)] == [1, 2, 3]


class Named(RoundHook):
    def before_asigning(self, round):
        pass


class Nothing(RoundHook):
    pass


class Kept(RoundHook):
    def state(self):
        return {"devices": {1, 2}}


class Sampler(RoundHook):
    def __init__(self, devices=(0,)) -> None:
        self._devices = devices

    def before_assigning(self, round):
        round.devices = self._devices


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        ([Named()], "hook Named: there is no point 'before_asigning' in a round: did you mean 'before_assigning'"),
        ([Nothing()], "hook Nothing does nothing at any point of a round: it has before_assigning, budget"),
        ([Kept()], "hook Kept: its state is no JSON: Object of type set"),
        ([Sampler(), Sampler()], "hook Sampler: it is given twice"),
    ],
)
def test_what_can_be_seen_is_refused_before_round_1(tmp_path, hooks, why):
    with pytest.raises(ConfigError, match=why):
        build(small_config(tmp_path), hooks=hooks)


def test_a_private_run_samples_its_devices_itself():
    with pytest.raises(HookError, match="hook Sampler: it chooses devices, and differential privacy"):
        check_hooks([Sampler()], mock.Mock(privacy=object()))


class Generous(RoundHook):
    def budget(self, device, budget):
        return replace(budget, memory_bytes=budget.memory_bytes + 1)


class Changing(RoundHook):
    def after_finishing(self, round):
        round.metrics["late"] = "much"


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (Generous(), r"hook Generous: it gives device \d memory_bytes = "),
        (Changing(), "hook Changing: its figure 'late' is 'much', not a number"),
        (Sampler([0, 99]), "hook Sampler: device 99 is not there in round 1"),
        (Sampler([0, 0]), "hook Sampler: round.devices has a device twice"),
        (Sampler("01"), "hook Sampler: round.devices must be a list of numbers of devices"),
    ],
)
def test_what_a_hook_may_not_do_ends_the_run(tmp_path, hook, why):
    engine, scorer = build(small_config(tmp_path), hooks=[hook])
    with pytest.raises(HookError, match=why):
        engine.run_round(simulated_grid(), 1, scorer)


class Counting(RoundHook):
    count = 0

    def at_end(self, round):
        self.count += 1

    def state(self):
        return {"count": self.count}

    def load(self, values):
        self.count = values["count"]


def test_what_a_hook_keeps_is_in_the_checkpoint_and_must_go_on(tmp_path):
    config = small_config(tmp_path, rounds=1)
    run_dir = run(simulated_grid(), config, build(config, hooks=[Counting()]))
    assert json.loads((run_dir / "checkpoint/round-1/state.json").read_text())["values"]["hooks"] == {
        "Counting": {"count": 1}
    }
    config = config.model_copy(update={"rounds": 2, "resume": True})
    with pytest.raises(HookError, match="the checkpoint has what hook Counting keeps: give the hook again"):
        run(simulated_grid(), config)
    hook = Counting()
    run(simulated_grid(), config, build(config, hooks=[hook]))
    assert hook.count == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("EarlyStop", "hooks = 'EarlyStop'.*must be like 'package.module:Name'"),
        ("nowhere_at_all:Hook", "there is no module 'nowhere_at_all'"),
        ("json:JSONDecoder", "a hook is a class of wildflower.rounds.hooks.RoundHook"),
        ("tests.rounds.test_hooks:Sampler(", "must be like"),
        ("tests.rounds.test_hooks:Sampler(x)", "must be like"),
    ],
)
def test_a_text_that_names_no_hooks_is_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        RunConfig.from_run_config({"hooks": text})


def test_arguments_that_a_hook_does_not_have_are_named(tmp_path):
    config = small_config(tmp_path, hooks="tests.rounds.test_hooks:Sampler(patience = 1)")
    with pytest.raises(ValueError, match=r"Sampler\(patience = 1\): TypeError: .*unexpected keyword argument"):
        build(config)
