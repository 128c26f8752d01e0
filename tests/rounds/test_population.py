import json
import re

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from tests.grid import InProcessGrid
from tests.small_run import FakeTime
from wildflower.client_app.app import app as client
from wildflower.devices.fleet import Fleet
from wildflower.devices.resource_report import DeviceReport
from wildflower.messages.orders import NodeReport
from wildflower.messages.wire import to_records
from wildflower.rounds.connected_devices import ConnectedDevices
from wildflower.rounds.population import Holdings, NoNodesError
from wildflower.rounds.simulated_devices import SimulatedDevices
from wildflower.tasks.task import TaskSpec, load_task


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr("wildflower.rounds.exchange.time", fake)
    for module in ("population", "connected_devices"):
        monkeypatch.setattr(f"wildflower.rounds.{module}.time", fake)
    return fake


def fleet(folder, devices=100_000):
    (folder / "one.toml").write_text('[[group]]\nname = "all"\nshare = 1.0\nmemory = "1 GB"\nlink = "8 Mbit/s"\n')
    return Fleet(folder / "one.toml", devices=devices, seed=1)


def holdings(examples):
    return Holdings(examples, lambda device: 0, 100)


def simulated(folder, workers, devices=100_000, examples=lambda device: 10):
    return SimulatedDevices(fleet(folder, devices), workers, holdings(examples), wait_seconds=1.0)


def nowhere(message, context):
    raise AssertionError("nothing is sent")


def test_a_sample_is_of_distinct_devices_and_follows_from_the_generator(tmp_path):
    population = simulated(tmp_path, 1)
    grid = InProcessGrid(nowhere, 1)
    first = population.sample(grid, np.random.default_rng(5), 50)
    assert len(set(first)) == 50
    assert first == population.sample(grid, np.random.default_rng(5), 50)
    assert first != population.sample(grid, np.random.default_rng(6), 50)
    assert max(first) > 50_000
    assert sorted(simulated(tmp_path, 1, devices=3).sample(grid, np.random.default_rng(5), 50)) == [0, 1, 2]


def test_the_longest_work_goes_first_to_the_least_loaded_worker(tmp_path):
    # 7 -> A, 6 -> B, 5 -> B (11), 4 -> A (11), 3 -> A or B (14), 1 -> the other (12).
    nodes = simulated(tmp_path, 2).nodes(InProcessGrid(nowhere, 2), range(6), [3.0, 7, 1, 4, 6, 5])
    assert nodes == [1, 1, 2, 1, 2, 2]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_loads_differ_by_less_than_the_longest_work(workers, tmp_path):
    work = np.random.default_rng(1).uniform(1, 100, size=60).tolist()
    nodes = simulated(tmp_path, workers).nodes(InProcessGrid(nowhere, 7), range(60), work)
    loads = [sum(w for w, n in zip(work, nodes, strict=True) if n == node) for node in set(nodes)]
    assert len(loads) == workers
    assert max(loads) - min(loads) <= min(work) * 3 + 1e-9 or max(loads) - min(loads) < max(work) / 10


def test_fewer_nodes_than_workers_do_the_work_after_a_while(tmp_path, clock):
    assert set(simulated(tmp_path, 4).nodes(InProcessGrid(nowhere, 2), range(8), [1.0] * 8)) == {1, 2}
    assert sum(clock.slept) == pytest.approx(1.0, abs=0.2)


def test_no_node_at_all_is_a_clear_error(tmp_path):
    with pytest.raises(NoNodesError, match="no node has connected within 1 s"):
        simulated(tmp_path, 2).nodes(InProcessGrid(nowhere, 0), [0], [1.0])


def test_nodes_that_connect_while_the_run_waits_are_taken(tmp_path, clock):
    grid = InProcessGrid(nowhere, 3)
    everyone = dict(grid.contexts)
    grid.contexts = {}
    sleep = clock.sleep
    clock.sleep = lambda seconds: (sleep(seconds), grid.contexts.update(everyone))[0]
    assert set(simulated(tmp_path, 3).nodes(grid, range(3), [1.0] * 3)) == {1, 2, 3}


def elsewhere(folder, workers):
    return SimulatedDevices(fleet(folder, 60), workers, holdings(lambda device: 1), wait_seconds=1.0, elsewhere=True)


def test_a_device_keeps_its_node_elsewhere_and_only_those_of_a_lost_node_go_to_others(tmp_path, clock):
    population, grid = elsewhere(tmp_path, 3), InProcessGrid(nowhere, 3)
    first = population.nodes(grid, range(60), [1.0] * 60)
    assert all(first.count(node) >= 10 for node in (1, 2, 3))
    assert population.nodes(grid, [7, 3], [9.0, 1.0]) == [first[7], first[3]]
    contexts = dict(grid.contexts)
    del grid.contexts[2]
    second = population.nodes(grid, range(60), [1.0] * 60)
    assert 2 not in second
    assert [new for old, new in zip(first, second, strict=True) if old != 2] == [old for old in first if old != 2]
    assert not clock.slept  # a run that has begun goes on with those that are there
    grid.contexts = contexts
    assert population.nodes(grid, range(60), [1.0] * 60) == first


def test_a_node_that_comes_later_takes_no_device_from_those_that_are_there(tmp_path, clock):
    population, grid = elsewhere(tmp_path, 2), InProcessGrid(nowhere, 3)
    contexts = dict(grid.contexts)
    del grid.contexts[1]  # of the lowest number
    first = population.nodes(grid, range(60), [1.0] * 60)
    assert set(first) == {2, 3}
    grid.contexts = dict(contexts)
    assert population.nodes(grid, range(60), [1.0] * 60) == first
    del grid.contexts[3]  # now there is a place
    second = population.nodes(grid, range(60), [1.0] * 60)
    assert set(second) == {1, 2}


def test_answers_from_elsewhere_are_waited_for_for_an_hour_at_most(tmp_path):
    assert elsewhere(tmp_path, 2).answer_seconds(None) == elsewhere(tmp_path, 2).answer_seconds(5.0) == 3600
    assert simulated(tmp_path, 2).answer_seconds(5.0) is None
    assert connected().answer_seconds(5.0) == 5.0


def test_a_run_waits_for_its_workers_elsewhere_before_it_begins(tmp_path, clock):
    assert set(elsewhere(tmp_path, 4).nodes(InProcessGrid(nowhere, 2), range(60), [1.0] * 60)) == {1, 2}
    assert sum(clock.slept) == pytest.approx(1.0, abs=0.2)


def test_simulated_time_is_that_of_the_links_and_the_speed(tmp_path):
    population = simulated(tmp_path, 1)
    timing = population.timing(7, bytes_down=10**6, flops=20e9, bytes_up=2 * 10**6)
    # 8 Mbit/s carry a megabyte per second; the reference is 10 GFLOP/s.
    assert (timing.download_seconds, timing.training_seconds, timing.upload_seconds) == pytest.approx((1, 2, 2))
    population.advance(3.5, 100.0)
    assert population.now_seconds == 3.5


# One device per node.


def config(node):
    return {"partition-id": node - 1, "num-partitions": 9}


def connected(**changes):
    return ConnectedDevices(
        holdings(lambda device: 1), **{"wanted": 1, "report_max_age_seconds": 60.0, "query_seconds": 5.0} | changes
    )


def sample(population, grid, count=9):
    return sorted(population.sample(grid, np.random.default_rng(1), count))


def queries(grid):
    return [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "query"]


def test_every_node_says_which_device_it_carries_and_what_it_can_spend():
    grid, population = InProcessGrid(client, 3, lambda node: {"partition-id": 10 - node}), connected()
    assert sample(population, grid) == [7, 8, 9]
    assert population.nodes(grid, [9, 7], [1.0, 1.0]) == [1, 3]
    report = population.report(8)
    assert 0 < report.memory_available_bytes <= report.memory_total_bytes
    assert population.tier(8) == report.kind
    assert population.timing(8, bytes_down=1, flops=1.0, bytes_up=1) is None
    assert sample(population, grid, 2) != [7, 8, 9]


def test_a_report_is_asked_for_again_when_it_is_old_or_the_device_failed(clock):
    grid, population = InProcessGrid(client, 3, config), connected()
    sample(population, grid)
    sample(population, grid)
    assert queries(grid) == [1, 2, 3]
    clock.now += 59
    population.replied(1, population.report(1))  # a newer one came with an update
    population.ask_again(2)
    sample(population, grid)
    assert queries(grid) == [1, 2, 3, 3]
    clock.now += 10
    sample(population, grid)
    assert queries(grid) == [1, 2, 3, 3, 1]


def test_a_silent_node_is_left_out_until_it_answers(clock):
    grid, population = InProcessGrid(client, 3, config), connected()
    grid.silent = {2}
    assert sample(population, grid) == [0, 2]
    assert sum(clock.slept) == pytest.approx(5.0, abs=0.3)
    assert population.busy == {2}
    waited = sum(clock.slept)
    assert sample(population, grid) == [0, 2]
    assert sum(clock.slept) == waited  # nobody waits for a busy node
    grid.silent = set()
    assert sample(population, grid) == [0, 1, 2]
    assert population.busy == set()
    assert len(queries(grid)) == 4  # the silent node was asked once more, and its answer looked for
    # A query that nobody reads any more is not worked through hours later.
    assert [m.metadata.ttl for m in grid.sent if m.metadata.message_type == "query"] == [5.0, 5.0, 5.0, 600.0]


def test_where_all_are_busy_the_next_round_waits_for_the_first(clock):
    grid, population = InProcessGrid(client, 2, config), connected(wait_seconds=30.0)
    assert sample(population, grid) == [0, 1]
    population.busy |= {1, 2}
    grid.silent = {1, 2}
    sleep = clock.sleep

    def one_answers_after_ten_seconds(seconds):
        sleep(seconds)
        if clock.now >= 1010:
            grid.silent = {1}

    clock.sleep = one_answers_after_ten_seconds
    assert sample(population, grid) == [1]
    assert clock.now == pytest.approx(1010, abs=0.5)
    population.busy |= {2}
    grid.silent = {1, 2}
    clock.sleep = sleep
    assert sample(population, grid) == []
    assert clock.now == pytest.approx(1040, abs=1)


@pytest.mark.parametrize("code", [2, 5, 8])
def test_a_node_that_reports_no_more_is_left_out(code, clock):
    grid, population = InProcessGrid(client, 3, config), connected()
    assert sample(population, grid) == [0, 1, 2]
    grid.broken = {1: code}
    population.ask_again(0)
    assert sample(population, grid) == [1, 2]
    assert population.connected(grid, [0, 1, 2]) == [1, 2]
    del grid.contexts[3]
    assert sample(population, grid) == [1]
    assert population.connected(grid, [0, 1, 2]) == [1]


def test_the_second_node_that_claims_a_device_is_refused():
    grid, population = InProcessGrid(client, 3, lambda node: {"partition-id": min(node, 2)}), connected()
    assert sample(population, grid) == [1, 2]
    assert population.nodes(grid, [2], [1.0]) == [2]
    # Nor does it become the device when that one's report is old, or has failed once.
    population.ask_again(2)
    grid.broken = {2: 2}
    assert sample(population, grid) == [1]
    grid.broken = {}
    assert sample(population, grid) == [1, 2]
    assert population.nodes(grid, [2], [1.0]) == [2]


def saying(numbers):
    """Answers queries with the device that `numbers` has for the node."""
    return lambda message, context: Message(
        to_records(NodeReport(device=numbers[context.node_id], report=GOOD)), reply_to=message
    )


def ask_all(population, grid):
    for device in range(3):
        population.ask_again(device)
    return sample(population, grid)


def test_a_node_cannot_take_the_number_of_one_that_is_there(caplog):
    numbers = {1: 0, 2: 1}
    grid, population = InProcessGrid(saying(numbers), 2, config), connected()
    assert sample(population, grid) == [0, 1]
    numbers[1] = 1
    assert ask_all(population, grid) == [1]
    assert population.nodes(grid, [1], [1.0]) == [2]
    assert "Nodes 2 and 1 both say they carry device 1: the second is refused" in caplog.text


def test_a_number_that_was_wrong_can_be_mended_also_in_a_resumed_run():
    numbers = {1: 0, 2: 0}
    grid, population = InProcessGrid(saying(numbers), 2, config), connected()
    assert sample(population, grid) == [0]
    assert population.nodes(grid, [0], [1.0]) == [1]
    resumed = connected()
    resumed.load_state_dict(json.loads(json.dumps(population.state_dict())))
    numbers[1] = 1
    for found in (population, resumed):
        ask_all(found, grid)
        assert ask_all(found, grid) == [0, 1]  # node 2 may have been asked before node 1 gave its number up
        assert found.nodes(grid, [0, 1], [1.0, 1.0]) == [2, 1]
        assert [(state.device, state.node) for state in found.newest_reports()] == [(0, 2), (1, 1)]


def test_a_devices_tier_is_the_kind_that_it_said_first():
    reports = [{**GOOD, "kind": kind} for kind in ("pi", "jetson", "phone")]

    def handle(message, context):
        return Message(to_records(NodeReport(device=0, report=reports.pop(0))), reply_to=message)

    grid, population = InProcessGrid(handle, 1, config), connected()
    for _ in range(3):
        assert ask_all(population, grid) == [0]
        assert population.tier(0) == "pi"
    assert population.report(0).kind == "phone"


def test_a_stand_in_keeps_the_device_that_its_first_node_gives_up():
    numbers = {1: 0, 2: 0}
    grid, population = InProcessGrid(saying(numbers), 2, config), connected()
    first, second = grid.contexts.pop(1), grid.contexts.pop(2)
    grid.contexts[1] = first
    assert sample(population, grid) == [0]
    del grid.contexts[1]
    grid.contexts[2] = second
    assert sample(population, grid) == [0]
    # Its report is still fresh when the first node comes back with another number.
    grid.contexts[1] = first
    numbers[1] = 1
    assert sample(population, grid) == [0, 1]
    assert population.nodes(grid, [0, 1], [1.0, 1.0]) == [2, 1]
    assert [population.tier(device) for device in (0, 1)] == [GOOD["kind"]] * 2


def test_two_nodes_whose_numbers_were_swapped():
    numbers = {1: 0, 2: 1}
    grid, population = InProcessGrid(saying(numbers), 2, config), connected()
    assert sample(population, grid) == [0, 1]
    numbers.update({1: 1, 2: 0})
    ask_all(population, grid)
    assert ask_all(population, grid) == [0, 1]
    assert population.nodes(grid, [0, 1], [1.0, 1.0]) == [2, 1]


def test_a_node_carries_one_device_at_a_time():
    numbers = {1: 0, 2: 1, 3: 0}
    grid, population = InProcessGrid(saying(numbers), 3, config), connected()
    first, second = grid.contexts.pop(1), grid.contexts[2]
    assert sample(population, grid) == [0, 1]  # node 3 stands in for node 1
    del grid.contexts[2]
    numbers[3] = 1
    assert ask_all(population, grid) == [1]
    assert population.nodes(grid, [1], [1.0]) == [3]
    # Both are back: device 1 belongs to the node that first said so.
    grid.contexts.update({1: first, 2: second})
    assert ask_all(population, grid) == [0, 1]
    assert population.nodes(grid, [0, 1], [1.0, 1.0]) == [1, 2]


def test_a_device_whose_node_is_gone_is_another_nodes_until_the_first_is_back():
    grid, population = InProcessGrid(client, 3, lambda node: {"partition-id": min(node, 2)}), connected()
    assert sample(population, grid) == [1, 2]
    first = grid.contexts.pop(2)
    assert sample(population, grid) == [1, 2]
    assert population.nodes(grid, [2], [1.0]) == [3]
    # A run that is resumed knows it as well.
    resumed = connected()
    resumed.load_state_dict(json.loads(json.dumps(population.state_dict())))
    grid.contexts[2] = first
    for found in (population, resumed):
        assert sample(found, grid) == [1, 2]
        assert found.nodes(grid, [2], [1.0]) == [2]
        found.ask_again(2)
        assert sample(found, grid) == [1, 2]
        assert found.nodes(grid, [2], [1.0]) == [2]


def answering(records):
    def handle(message, context):
        return client(message, context) if context.node_id != 2 else Message(records, reply_to=message)

    return handle


GOOD = DeviceReport("x86-64", memory_total_bytes=10, memory_available_bytes=5).to_json()


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"wildflower": ConfigRecord({"json": "{"})}),
        to_records(NodeReport(device=1, report={})),
        to_records(NodeReport(device=1, report=GOOD | {"memory_available_bytes": 11})),
        to_records(NodeReport(device=1, report=GOOD | {"memory_total_bytes": "10 MB"})),
        to_records(NodeReport(device=1, report=GOOD | {"down_mbit_per_s": -1.0})),
        to_records(NodeReport(device=1, report=GOOD | {"battery": 0.5})),
    ],
    ids=["empty", "garbage", "no report", "more than all", "a text", "negative", "unknown key"],
)
def test_a_report_that_cannot_be_is_refused_and_the_device_left_out(records):
    grid, population = InProcessGrid(answering(records), 3, config), connected()
    assert sample(population, grid) == [0, 2]
    good = InProcessGrid(answering(to_records(NodeReport(device=1, report=GOOD))), 3, config)
    assert sample(connected(), good) == [0, 1, 2]


@pytest.mark.parametrize("number", [None, -1, "1", True, 1.0])
def test_a_node_that_does_not_know_its_device_is_left_out(number):
    def node_config(node):
        return config(node) if node != 2 else {} if number is None else {"partition-id": number}

    assert sample(connected(), InProcessGrid(client, 3, node_config)) == [0, 2]


@pytest.mark.thorough
def test_a_node_whose_device_the_task_has_no_data_for_is_left_out(tmp_path, caplog):
    task = load_task(TaskSpec(name="digits", devices=2))
    population = ConnectedDevices(
        Holdings(task.training_examples, task.test_examples, len(task.test)), wanted=1, report_max_age_seconds=60.0
    )
    assert population.everyone(InProcessGrid(client, 3, config)) == [0, 1]
    assert "report that is refused: device 2 is not one of 0 to 1" in caplog.text


def test_a_run_on_hardware_says_what_it_waits_for_and_until_when(clock, caplog):
    caplog.set_level("INFO", "flwr")
    sample(connected(wanted=3, wait_seconds=10.0), InProcessGrid(client, 2, config))
    waiting = [text for text in caplog.messages if text.startswith("Waiting for nodes")]
    assert len(waiting) == 1
    assert re.fullmatch(r"Waiting for nodes: 2 connected so far, 3 wanted, fewer from \d\d:\d\d:\d\d on", waiting[0])


def test_a_run_goes_on_with_as_few_as_minimum_devices_and_with_less_it_ends(clock, caplog):
    caplog.set_level("INFO", "flwr")
    grid, population = InProcessGrid(client, 2, config), connected(wanted=3, minimum=2, wait_seconds=10.0)
    assert sample(population, grid) == [0, 1]
    assert re.search(r"2 connected so far, 3 wanted, 2 or more from \d\d:\d\d:\d\d on", caplog.text)
    del grid.contexts[2]
    with pytest.raises(NoNodesError, match=r"1 nodes have connected within 10 s, and minimum-devices = 2"):
        sample(population, grid)
    assert "1 connected so far, 2 wanted" in caplog.text


def test_a_run_on_hardware_waits_for_the_nodes_it_needs(clock):
    grid, population = InProcessGrid(client, 2, config), connected(wanted=3, wait_seconds=10.0)
    assert sample(population, grid) == [0, 1]
    assert sum(clock.slept) == pytest.approx(10.0, abs=0.2)
    with pytest.raises(NoNodesError, match="no node has connected within 10 s"):
        sample(connected(wait_seconds=10.0), InProcessGrid(client, 0))


def test_an_overrun_lowers_the_budget_below_what_overran_and_rounds_give_it_back():
    population = connected()
    assert population.memory_factor(3) == 1.0
    population.overran(3, predicted=0.95)
    assert population.memory_factor(3) == pytest.approx(0.7)
    population.overran(3, predicted=0.1)
    assert population.memory_factor(3) == pytest.approx(0.7 * 0.09)
    population.advance(0.0, 12.0)
    assert population.memory_factor(3) == pytest.approx(0.7 * 0.09 * 1.05)
    assert population.memory_factor(2) == 1.0
    resumed = connected()
    resumed.load_state_dict(population.state_dict())
    assert resumed.memory_factor(3) == population.memory_factor(3)
    for _ in range(60):
        resumed.advance(0.0, 1.0)
    assert resumed.memory_factor(3) == 1.0
    assert resumed.state_dict()["memory_factors"] == {}


def test_what_a_node_said_last_is_kept_when_it_is_busy_or_gone(clock):
    grid, population = InProcessGrid(client, 2, config), connected()
    sample(population, grid)
    grid.silent = {1}
    population.busy = {1}
    del grid.contexts[2]
    clock.now += 5
    assert sample(population, grid) == []
    assert [(state.node, state.device) for state in population.newest_reports()] == [(1, 0), (2, 1)]


def test_the_newest_report_of_every_node_is_kept_with_its_age(clock):
    grid, population = InProcessGrid(client, 2, config), connected()
    assert population.newest_reports() == []
    sample(population, grid)
    clock.now += 20
    population.replied(1, DeviceReport("newer", memory_total_bytes=10, memory_available_bytes=5))
    population.ask_again(0)
    population.overran(0, predicted=1.0)
    clock.now += 3
    first, second = population.newest_reports()
    assert (first.node, first.device, first.memory_factor) == (1, 0, pytest.approx(0.7))
    assert first.age_seconds == pytest.approx(23, abs=0.5)  # the report of a device that failed is old, not gone
    assert (second.node, second.device, second.report.kind, second.age_seconds) == (2, 1, "newer", 3)


def test_only_nodes_that_are_drawn_are_asked_and_others_for_those_that_do_not_answer(clock):
    grid, population = InProcessGrid(client, 300, lambda node: {"partition-id": node - 1}), connected()
    first = population.sample(grid, np.random.default_rng(3), 10)
    assert sorted(node - 1 for node in queries(grid)) == sorted(first)
    assert len(first) == 10
    clock.now += 1000
    grid.silent = set(range(2, 301, 2))
    found = population.sample(grid, np.random.default_rng(4), 10)
    assert len(found) == 10
    assert not grid.silent & {device + 1 for device in found}
    asked = queries(grid)[10:]
    assert {node - 1 for node in asked} - set(found) == {node - 1 for node in grid.silent & set(asked)}


def test_a_hundred_nodes_are_asked_before_the_first_round_what_devices_can_spend():
    grid, population = InProcessGrid(client, 1000, lambda node: {"partition-id": node - 1}), connected()
    assert len(population.present(grid)) == 100
    assert len(queries(grid)) == 100


def test_devices_without_work_take_no_place():
    grid, population = InProcessGrid(client, 6, config), connected()
    found = population.sample(grid, np.random.default_rng(1), 2, lambda devices: sum(d in (0, 4) for d in devices))
    assert {0, 4} <= set(found)
    assert len(population.sample(grid, np.random.default_rng(1), 2)) == 2


def resting_client(rests):
    """A client whose devices rest, by number, for as long as `rests` says."""

    def answer(message, context):
        device = context.node_config["partition-id"]
        seconds = rests.get(device)
        report = DeviceReport(
            "pi",
            memory_total_bytes=10,
            memory_available_bytes=5,
            resting="not charging" if seconds else None,
            resting_seconds=seconds,
        )
        records = to_records(NodeReport(device=device, report=report.to_json()))
        return Message(records, reply_to=message)

    return answer


def test_a_device_at_rest_is_not_sampled_and_not_asked_until_it_may_take_part(clock, caplog):
    rests = {1: 600.0}
    grid, population = InProcessGrid(resting_client(rests), 3, config), connected()
    with caplog.at_level("INFO"):
        assert sample(population, grid) == [0, 2]
        assert "Device 1 takes no part now: not charging" in caplog.text
        assert population.absences() == ["Device 1 takes no part now: not charging."]
        clock.now += 300
        assert sample(population, grid) == [0, 2]
        assert queries(grid).count(2) == 1
        rests.clear()
        clock.now += 301
        assert sample(population, grid) == [0, 1, 2]
        assert queries(grid).count(2) == 2


def test_where_all_rest_the_round_waits_for_the_first(clock, caplog):
    rests = {0: 7200.0, 1: 3600.0}
    grid, population = InProcessGrid(resting_client(rests), 2, config), connected()
    began = clock.now
    sleep = clock.sleep

    def wake(seconds):
        sleep(seconds)
        if clock.now - began >= 3600:
            rests.clear()

    clock.sleep = wake
    with caplog.at_level("INFO"):
        assert sample(population, grid) == [1]
    assert 3600 <= clock.now - began < 3700
    assert "All devices that could be asked rest, until" in caplog.text


def test_a_device_that_says_with_its_update_that_it_rests_is_asked_nothing_more(clock):
    grid, population = InProcessGrid(resting_client({}), 2, config), connected()
    assert sample(population, grid) == [0, 1]
    report = DeviceReport("pi", memory_total_bytes=10, memory_available_bytes=5, resting="hot", resting_seconds=300.0)
    population.replied(0, report)
    assert population.connected(grid, [0, 1]) == [1]
    assert population.everyone(grid) == [1]
    assert sample(population, grid) == [1]


def test_simulated_devices_take_part_within_their_hours(tmp_path, caplog):
    (tmp_path / "night.toml").write_text(
        '[[group]]\nname = "day"\ncount = 4\nmemory = "1 GB"\nhours = "08:00-20:00"\n'
        '[[group]]\nname = "night"\ncount = 6\nmemory = "1 GB"\nhours = "22:00-06:00"\n'
    )
    fleet = Fleet(tmp_path / "night.toml", devices=10, seed=1)
    population = SimulatedDevices(fleet, 1, holdings(lambda device: 10), wait_seconds=1.0)
    grid = InProcessGrid(nowhere, 1)
    assert sorted(population.sample(grid, np.random.default_rng(1), 50)) == [4, 5, 6, 7, 8, 9]
    population.advance(6 * 3600.0, 0.0)
    with caplog.at_level("INFO"):
        assert sorted(population.sample(grid, np.random.default_rng(1), 50)) == [0, 1, 2, 3]
    assert population.now_seconds == 8 * 3600.0
    assert "No device takes part at simulated hour 6.00: the next do 7200 s later" in caplog.text
    assert population.present(grid) == list(range(10))
    assert population.absences() == [
        "Devices of tier day take part at 08:00-20:00 only.",
        "Devices of tier night take part at 22:00-06:00 only.",
    ]
