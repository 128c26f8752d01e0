"""One device of ten breaks secure aggregation: rounds go on, no honest one is blamed, the liar is named if known."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from tests.grid import InProcessGrid
from tests.small_run import connected_grid, same_bits, small_config, started
from wildflower.client_app import work, worker
from wildflower.messages.flower_records import make_records
from wildflower.messages.masks import Secrets, digest_of_members, hash_of_share, seal, split_seed
from wildflower.messages.orders import KeyAnswer, KeyReply, Member, Reply
from wildflower.messages.wire import from_records, to_records
from wildflower.rounds.engine import Engine
from wildflower.rounds.hooks import RoundResult
from wildflower.rounds.quarantine import MAX_REFUSALS

LIAR = 2  # among the first seven, whose shares are tried first
TEN = {
    "strategy": "fedavg",
    "fleet": "",
    "devices": 10,
    "devices-per-round": 10,
    "family": "mlp",
    "family-arguments": "hidden = [4]",
    "examples-per-device": 12,
    "secure-aggregation.minimum": 5,
    "evaluate-every": 100,
    "rounds": 100,
}


@pytest.fixture(autouse=True)
def _work_is_done_in_this_process(monkeypatch):
    monkeypatch.setattr(worker, "ask", work.do)


@dataclass
class Ran:
    """What came of some rounds: the engine, each round's result, and what changed in the model in each."""

    engine: Engine
    results: list[RoundResult] = field(default_factory=list)
    models: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def outcomes(self, number: int) -> dict[int, str]:
        return {line["device"]: line["outcome"] for line in self.results[number - 1].devices}

    def trained(self, number: int) -> list[int]:
        return sorted(device for device, outcome in self.outcomes(number).items() if outcome == "trained")

    @property
    def quarantined(self) -> set[int]:
        return {node - 1 for node in self.engine.population.quarantined()}


def run(folder: Path, grid: InProcessGrid, rounds: int, **keys: Any) -> Ran:
    """The first rounds of a run of ten devices."""
    folder.mkdir(exist_ok=True)
    engine, scorer = started(
        small_config(folder, **TEN | {key.replace("__", ".").replace("_", "-"): v for key, v in keys.items()})
    )
    engine.start()
    ran = Ran(engine)
    ran.models.append(engine.state().tensors)
    for number in range(1, rounds + 1):
        ran.results.append(engine.run_round(grid, number, scorer))
        ran.models.append({name: value.clone() for name, value in engine.state().tensors.items()})
    return ran


def of_liar(message: Message, devices: tuple[int, ...] = (LIAR,)) -> bool:
    return message.metadata.src_node_id - 1 in devices and not message.has_error() and len(message.content) > 0


def lying(grid: InProcessGrid, step: str, change: Callable[[dict[str, Any]], object]) -> InProcessGrid:
    """A liar changes what it answers in one of the steps."""

    def tamper(reply: Message) -> Message:
        if of_liar(reply) and '"answers"' in (text := str(reply.content["wildflower"]["json"])):
            value = json.loads(text)
            [answer] = value["answers"]
            if answer[step]:
                change(answer)
                reply.content = to_records(KeyReply.model_validate_json(json.dumps(value)))
        return reply

    grid.tamper = tamper
    return grid


def hex_of(count: int, letters: int, start: int = 0) -> list[str]:
    return [f"{number + start:0{letters}x}" for number in range(count)]


def other_shares(answer: dict[str, Any], folder: Path, *, vouched: bool) -> None:
    """Seal shares of another seed than its own; `vouched`: and tell the hashes of those."""
    session = json.loads(next((folder / f"node-{LIAR + 1}").rglob("secure.json")).read_text())
    members = [Member(**member) for member in session["members"]]
    key = Secrets(bytes.fromhex(session["root"])).channel
    said = digest_of_members(members, session["threshold"], session["minimum"])
    two = [split_seed(bytes([number] * 16), session["threshold"], len(members)) for number in (1, 2)]
    answer["sealed"] = [seal(key, LIAR, m, a, b, said).hex() for m, a, b in zip(members, *two, strict=True)]
    if vouched:
        answer["share_hashes"] = [hash_of_share(share) for of_seed in two for share in of_seed]


Lie = Callable[[dict[str, Any]], object]
# What the liar does in one step, and whether its update is left out at once, so that no sum is lost.
KEYS: dict[str, tuple[str, Lie]] = {
    "a channel key of zeros": ("member", lambda a: a["member"].update(channel_key="00" * 32)),
    "a mask key of low order": ("member", lambda a: a["member"].update(mask_key="01" + "00" * 31)),
    "one key for both": ("member", lambda a: a["member"].update(mask_key=a["member"]["channel_key"])),
    "a block of another alone": ("member", lambda a: a.update(only_with=[5])),
    "another's number": ("member", lambda a: a["member"].update(device=5)),
    "too few sealed": ("sealed", lambda a: a.update(sealed=a["sealed"][:-1])),
    "gaps among the sealed": ("sealed", lambda a: a.update(sealed=["", *a["sealed"][1:]])),
    "no hashes": ("sealed", lambda a: a.update(share_hashes=[])),
}
SHARES: dict[str, tuple[str, Lie]] = {
    "wrong shares": ("shares", lambda a: a.update(shares=hex_of(len(a["shares"]), 32))),
    "shares that it could not read": ("shares", lambda a: a.update(shares=[""] * len(a["shares"]))),
    "too few shares": ("shares", lambda a: a.update(shares=a["shares"][1:])),
    "too few confirmations": ("confirmed", lambda a: a.update(confirmed=a["confirmed"][1:])),
}
DEALT: dict[str, tuple[str, Lie]] = {
    "sealed noise": ("sealed", lambda a: a.update(sealed=hex_of(len(a["sealed"]), 96))),
    "hashes of nothing": ("sealed", lambda a: a.update(share_hashes=hex_of(len(a["share_hashes"]), 64))),
}
ROUNDS = MAX_REFUSALS + 1


def named(caplog: pytest.LogCaptureFixture) -> set[object]:
    """The nodes of which the log says that they broke the protocol."""
    return {record.args[1] for record in caplog.records if "breaks secure aggregation" in record.msg and record.args}


def check_named(ran: Ran, caplog: pytest.LogCaptureFixture) -> None:
    assert ran.quarantined == {LIAR}
    last = len(ran.results)
    assert LIAR not in ran.outcomes(ROUNDS)
    assert ran.trained(last) == [device for device in range(10) if device != LIAR]
    assert named(caplog) == {LIAR + 1}
    assert all(torch.isfinite(value).all() for value in ran.models[-1].values())


@pytest.mark.parametrize("name", KEYS)
def test_who_makes_wrong_keys_or_shares_is_left_out_at_once(name, tmp_path, caplog):
    rounds = ROUNDS if name == "a channel key of zeros" else 1
    ran = run(tmp_path, lying(connected_grid(10, tmp_path), *KEYS[name]), rounds)
    honest = [device for device in range(10) if device != LIAR]
    assert [ran.trained(number) for number in range(1, rounds + 1)] == [honest] * rounds
    assert ran.outcomes(1)[LIAR].startswith("failed: ")
    assert named(caplog) == {LIAR + 1}
    if rounds == ROUNDS:
        check_named(ran, caplog)


@pytest.mark.parametrize("name", SHARES)
def test_who_reveals_wrong_shares_costs_nobody_anything(name, tmp_path, caplog):
    ran = run(tmp_path / "a", lying(connected_grid(10, tmp_path / "a"), *SHARES[name]), ROUNDS)
    assert [ran.trained(number) for number in range(1, ROUNDS)] == [list(range(10))] * (ROUNDS - 1)
    check_named(ran, caplog)
    if name == "wrong shares":
        honest = run(tmp_path / "b", connected_grid(10, tmp_path / "b"), 1)
        assert same_bits(honest.models[1], ran.models[1])


@pytest.mark.parametrize("name", [*DEALT, "shares of another seed", "shares of another seed that it vouches for"])
def test_whose_own_shares_are_wrong_costs_the_sum_until_it_is_quarantined(name, tmp_path, caplog):
    """Its update is in the sum, and nobody can take its mask off. The other half goes on from the same weights."""
    step, lie = DEALT.get(name, ("sealed", lambda a: other_shares(a, tmp_path, vouched="vouches" in name)))
    ran = run(tmp_path, lying(connected_grid(10, tmp_path), step, lie), ROUNDS + 1)
    half = [5, 6, 7, 8, 9]
    assert [ran.trained(number) for number in range(1, ROUNDS + 1)] == [[], half, [], half]
    assert {o.partition(": the shares of ")[2] for o in ran.outcomes(1).values()} == {
        f"device {LIAR}'s own seed are wrong"
    }
    assert same_bits(ran.models[0], ran.models[1])
    check_named(ran, caplog)


def test_good_rounds_in_between_do_not_make_up_for_lies(tmp_path, caplog):
    """Else a device that lies in two rounds of three would spoil the sums of these rounds for ever."""
    rounds = iter(range(1, 100))

    def lie(answer: dict[str, Any]) -> None:
        if next(rounds) % 3:
            answer.update(shares=answer["shares"][1:])

    ran = run(tmp_path, lying(connected_grid(10, tmp_path), "shares", lie), 5)
    assert [LIAR in ran.outcomes(number) for number in range(1, 6)] == [True] * 4 + [False]
    assert ran.quarantined == {LIAR}
    assert named(caplog) == {LIAR + 1}


def test_wrong_confirmations_stop_nobody(tmp_path):
    """Only who is told them knows that they are wrong: the liar is not named, and does no harm."""
    lie: Lie = lambda a: a.update(confirmed=hex_of(len(a["confirmed"]), 64))  # noqa: E731
    ran = run(tmp_path, lying(connected_grid(10, tmp_path), "confirmed", lie), 2)
    assert ran.trained(1) == ran.trained(2) == list(range(10))
    assert ran.quarantined == set()


@pytest.mark.parametrize("wrong", [[0], [0, 1, 3]])
def test_nobody_is_blamed_for_a_few_shares_of_which_one_of_two_is_guilty(wrong, tmp_path, caplog):
    """The liar seals wrong shares for three others, who then reveal what it has sealed."""

    def lie(answer: dict[str, Any]) -> None:
        for place in wrong:
            answer["share_hashes"][place] = "0" * 64

    ran = run(tmp_path, lying(connected_grid(10, tmp_path), "sealed", lie), 1)
    assert ran.trained(1) == list(range(10))
    assert ran.quarantined == set()
    assert named(caplog) == set()


def test_two_devices_with_the_same_keys_are_left_out_and_neither_is_blamed(tmp_path):
    grid, made = connected_grid(10, tmp_path), []

    def copied(reply: Message) -> Message:
        if of_liar(reply, (LIAR, LIAR + 1)) and '"answers"' in str(reply.content["wildflower"]["json"]):
            said, _ = from_records(KeyReply, reply.content)
            [answer] = said.answers
            if answer.member is not None:
                made.append(answer.member)
                member = made[0].model_copy(update={"device": answer.device})
                changed = KeyAnswer(device=answer.device, member=member)
                reply.content = to_records(said.model_copy(update={"answers": [changed]}))
                if len(made) == 2:
                    made.clear()
        return reply

    grid.tamper = copied
    ran = run(tmp_path, grid, 2)
    for number in (1, 2):
        assert (
            ran.outcomes(number)[LIAR] == ran.outcomes(number)[LIAR + 1] == "failed: another device has the same keys"
        )
        assert len(ran.trained(number)) == 8
    assert ran.engine.population.state_dict()["refusals"] == {}


def test_an_answer_that_cannot_be_read_counts_against_its_node_alone(tmp_path):
    grid = connected_grid(10, tmp_path)

    def tamper(reply: Message) -> Message:
        if of_liar(reply) and '"answers"' in str(reply.content["wildflower"]["json"]):
            reply.content = make_records('{"run": "small", "round": 1, "answers": 7}')
        return reply

    grid.tamper = tamper
    ran = run(tmp_path, grid, ROUNDS)
    assert ran.quarantined == {LIAR}
    assert all(len(ran.trained(number)) == 9 for number in range(1, ROUNDS + 1))


# Under the mask: nobody sees who has added what ----------------------------------------------------------------------


def adding(grid: InProcessGrid, word: int, value: int, rounds: tuple[int, ...]) -> InProcessGrid:
    """A liar adds to one word of its masked update."""

    def tamper(reply: Message) -> Message:
        if of_liar(reply) and reply.metadata.message_type == "train" and int(reply.metadata.group_id) in rounds:
            said, arrays = from_records(Reply, reply.content)
            words = np.frombuffer(arrays[0], dtype="<u8").copy()
            words[word : word + 1] += np.uint64(value % 2**64)
            reply.content = to_records(said, [words.tobytes()])
        return reply

    grid.tamper = tamper
    return grid


@pytest.mark.parametrize("value", [2**40, 2**50, 2**62, 2**63, -(2**62), -(2**40)])
def test_a_sum_of_no_honest_updates_is_dropped_and_the_next_rounds_are_as_ever(value, tmp_path, caplog):
    ran = run(tmp_path, adding(connected_grid(10, tmp_path), 7, value, (1,)), 2)
    assert same_bits(ran.models[0], ran.models[1])
    assert ran.trained(1) == []
    assert all(
        outcome.startswith("failed: the sum of its group can be of no honest updates, and is dropped")
        for outcome in ran.outcomes(1).values()
    )
    assert "is lost" in caplog.text
    assert ran.trained(2) == list(range(10))
    assert ran.quarantined == set()


def test_what_is_within_the_bound_is_told_nobody(tmp_path):
    """What cannot be bounded (docs/privacy.md): the mean may move by as much as honest devices could move it."""
    ran = run(tmp_path, adding(connected_grid(10, tmp_path), 7, 2**30, (1,)), 1)
    assert ran.trained(1) == list(range(10))


def test_a_norm_bound_holds_for_the_mean(tmp_path):
    """Devices hold themselves to it, so that honest sums are within it; a coordinate that is moved further is not."""
    far = run(tmp_path / "a", connected_grid(10, tmp_path / "a"), 1, learning_rate=1.0, local_steps=4)
    bounded = run(
        tmp_path / "b",
        connected_grid(10, tmp_path / "b"),
        1,
        learning_rate=1.0,
        local_steps=4,
        aggregation__norm_bound=0.05,
    )
    assert bounded.trained(1) == list(range(10))

    def moved(ran: Ran) -> float:
        change = [ran.models[1][name] - value for name, value in ran.models[0].items()]
        return float(torch.cat([part.flatten() for part in change]).norm())

    assert moved(far) > 0.1
    assert moved(bounded) <= 0.05 * (1 + 1e-5)
    grid = adding(connected_grid(10, tmp_path / "c"), 7, 2**28 * 120, (1,))  # by 1: plausible without a bound
    hostile = run(tmp_path / "c", grid, 2, aggregation__norm_bound=0.05)
    assert same_bits(hostile.models[0], hostile.models[1])
    assert "aggregation.norm-bound is 0.05" in hostile.outcomes(1)[0]
    assert hostile.trained(2) == list(range(10))
