import re
import sys
from pathlib import Path

import pytest

from wildflower.devices import fleet as fleet_module
from wildflower.devices.budget import budget_of
from wildflower.devices.fleet import FLEETS_DIR, Fleet, bundled_fleet
from wildflower.devices.resource_report import DeviceReport


def requirement(width):
    """A family whose memory grows with the width and whose payload grows with its square."""
    return int(1_000_000 * width) + 7, int(400_000 * width * width) + 1


@pytest.fixture
def load(tmp_path):
    """Loads a fleet from its text, with traces beside it."""

    def load(text, *, traces=None, **arguments):
        for name, content in (traces or {}).items():
            (tmp_path / name).write_text(content)
        (tmp_path / "fleet.toml").write_text(text)
        return Fleet(tmp_path / "fleet.toml", **{"seed": 3, "requirement": requirement, **arguments})

    return load


def group(keys, *, name="phones", count="count = 1"):
    return f'[[group]]\nname = "{name}"\n{count}\n{keys}\n'


TWO_GROUPS = group('memory = "1 GB"', count="count = 2") + group('memory = "2 GB"', name="boards", count="count = 3")


def test_devices_are_numbered_group_after_group(load):
    fleet = load(TWO_GROUPS)
    assert fleet.size == 5
    assert fleet.tiers == ["phones", "boards"]
    assert [fleet.tier(device) for device in range(5)] == ["phones"] * 2 + ["boards"] * 3


@pytest.mark.parametrize("device", [-1, 5])
def test_a_device_that_is_not_there(load, device):
    fleet = load(TWO_GROUPS)
    for ask in (fleet.tier, fleet.report, fleet.links, fleet.flop_per_s):
        with pytest.raises(ValueError, match=f"device {device} is not in the fleet: it has devices 0 to 4"):
            ask(device)


def test_the_digest_is_that_of_all_files(load):
    keys = 'memory = "1 GB"\nup_trace = "up.csv"'
    rising, falling = "seconds,mbit_per_s\n0,1\n1,2\n", "seconds,mbit_per_s\n0,2\n1,1\n"
    digests = {
        load(group(keys), traces={"up.csv": rising}).digest,
        load(group(keys), traces={"up.csv": rising}).digest,
        load(group(keys), traces={"up.csv": falling}).digest,
        load(group(keys + "\nspeed = 2"), traces={"up.csv": falling}).digest,
    }
    assert len(digests) == 3
    assert all(len(digest) == 64 for digest in digests)


def devices_of(fleet, tier):
    return [device for device in range(fleet.size) if fleet.tier(device) == tier]


def test_the_plainest_group(load):
    assert load(group('memory = "1 GB"')).report(0, 0.0) == DeviceReport(
        kind="simulated", memory_total_bytes=10**9, memory_available_bytes=10**9, flop_per_s=10e9
    )


def test_kind_links_and_speed(load):
    keys = 'kind = "jetson-nano"\nmemory = "4 GB"\ndown = "20 Mbit/s"\nup = "500 kbit/s"\nspeed = 0.5'
    assert load('reference = "60 GFLOP/s"\n' + group(keys)).report(0, 0.0) == DeviceReport(
        kind="jetson-nano",
        memory_total_bytes=4 * 10**9,
        memory_available_bytes=4 * 10**9,
        down_mbit_per_s=20.0,
        up_mbit_per_s=0.5,
        flop_per_s=30e9,
    )


def test_a_range_is_drawn_once_for_each_device(load):
    fleet = load(group('memory = { uniform = ["1 GB", "3 GB"] }', count="count = 400"))
    drawn = [fleet.report(device, 0.0).memory_available_bytes for device in range(400)]
    assert drawn == [fleet.report(device, 77.0).memory_available_bytes for device in range(400)]
    assert len(set(drawn)) == 400
    assert 1e9 <= min(drawn) < 1.05e9
    assert 2.95e9 < max(drawn) <= 3e9
    # The mean of 400 uniform draws is off by more than 4 x 0.577/20 GB once in 16,000 seeds; this seed is fixed.
    assert sum(drawn) / 400 == pytest.approx(2e9, abs=0.12e9)
    assert fleet.report(0, 0.0).memory_total_bytes == 3 * 10**9


def test_a_range_can_be_drawn_in_every_round(load):
    fleet = load(group('memory = { uniform = ["1 GB", "3 GB"], every = "round" }'))
    times = [0.0, 1.0, 1.5, 400.25]
    drawn = [fleet.report(0, seconds).memory_available_bytes for seconds in times]
    assert len(set(drawn)) == 4
    assert drawn == [fleet.report(0, seconds).memory_available_bytes for seconds in times]


def test_a_choice_of_two_values(load):
    fleet = load(group('memory = { choice = ["200 MB", "800 MB"], weights = [1, 3] }', count="count = 1000"))
    drawn = [fleet.report(device, 0.0).memory_available_bytes for device in range(1000)]
    assert set(drawn) == {200_000_000, 800_000_000}
    # 750 are expected, with a standard deviation of 13.7.
    assert 700 < drawn.count(800_000_000) < 800


def test_down_and_up_are_drawn_apart_and_link_gives_both_the_same(load):
    apart = (
        'memory = "1 GB"\ndown = { uniform = ["1 Mbit/s", "9 Mbit/s"] }\nup = { uniform = ["1 Mbit/s", "9 Mbit/s"] }'
    )
    report = load(group(apart)).report(0, 0.0)
    assert report.down_mbit_per_s != report.up_mbit_per_s
    report = load(group('memory = "1 GB"\nlink = { uniform = ["1 Mbit/s", "9 Mbit/s"] }')).report(0, 0.0)
    assert report.down_mbit_per_s == report.up_mbit_per_s


def test_speeds_are_relative_to_the_reference(load):
    keys = 'memory = "1 GB"\nspeed = { choice = [0.5, 2] }'
    fleet = load('reference = "100 MFLOP/s"\n' + group(keys, count="count = 50"))
    assert {fleet.report(device, 0.0).flop_per_s for device in range(50)} == {50e6, 200e6}
    assert [fleet.flop_per_s(device) for device in range(50)] == [fleet.report(d, 0.0).flop_per_s for d in range(50)]


def test_the_seed_decides_and_devices_differ(load):
    text = group(
        'memory = { uniform = ["1 GB", "3 GB"], every = "round" }\nspeed = { uniform = [1, 2] }', count="count = 9"
    )
    first, again, other = load(text), load(text), load(text, seed=4)
    reports = [first.report(device, 5.0) for device in range(9)]
    assert reports == [again.report(device, 5.0) for device in range(9)]
    assert not set(reports) & {other.report(device, 5.0) for device in range(9)}


def test_draws_stay_the_same_from_version_to_version(load):
    # A resumed run, and a node with another version, must see the same devices.
    fleet = load(group('memory = { uniform = ["0 B", "1 GB"], every = "round" }', count="count = 2"), seed=1)
    assert [fleet.report(1, seconds).memory_available_bytes for seconds in (0.0, 2.5)] == [811225407, 661462709]


def test_fits_width_is_exactly_what_the_width_needs_whatever_the_settings(load):
    fleet = load(group("fits_width = 0.5") + group("fits_width = 0.25", name="small"))
    for device, width in ((0, 0.5), (1, 0.25)):
        for fraction, seconds in ((1.0, 60.0), (0.37, 1.0), (0.8, None)):
            budget = budget_of(
                fleet.report(device, 9.0), memory_fraction=fraction, transfer_seconds=seconds, deadline_seconds=None
            )
            assert (budget.memory_bytes, budget.both_ways_bytes) == requirement(width)


def test_the_most_that_a_tier_has_is_told(load):
    drawn = 'training_memory = { uniform = ["1 MB", "3 MB"] }'
    fleet = load(group("fits_width = 0.5") + group(f'{drawn}\npayload = "400 kB"', name="b") + group(drawn, name="c"))
    memory_bytes, payload_bytes = requirement(0.5)
    assert fleet.most_bytes == {
        "phones": {"memory_bytes": memory_bytes, "payload_bytes": payload_bytes},
        "b": {"memory_bytes": 3_000_000, "payload_bytes": 400_000},
        "c": {"memory_bytes": 3_000_000, "payload_bytes": None},
    }


def test_a_payload_is_limited_whatever_the_links_carry(load):
    report = load(group('memory = "1 GB"\npayload = "40 kB"\ndown = "8 kbit/s"')).report(0, 0.0)
    budget = budget_of(report, memory_fraction=1.0, transfer_seconds=1.0, deadline_seconds=None)
    assert (budget.download_bytes, budget.upload_bytes) == (1_000, 40_000)


def test_widths_are_measured_once_for_each_group_not_for_each_device(load):
    asked = []

    def counting(width):
        asked.append(width)
        return requirement(width)

    text = group("fits_width = 0.5", count="share = 0.5") + group("fits_width = 1", name="big", count="share = 0.5")
    fleet = load(text, devices=1000, requirement=counting)
    for device in range(0, 1000, 10):
        fleet.report(device, 0.0)
    assert asked == [0.5, 1.0]


def test_a_slow_link_limits_a_group_that_fits_a_width_too(load):
    report = load(group('fits_width = 1.0\nlink = "8 kbit/s"')).report(0, 0.0)
    budget = budget_of(report, memory_fraction=1.0, transfer_seconds=10.0, deadline_seconds=None)
    assert budget.both_ways_bytes == 10_000


def test_training_memory_is_set_apart_and_no_fraction_is_taken(load):
    report = load(group('training_memory = "300 MB"')).report(0, 0.0)
    budget = budget_of(report, memory_fraction=0.5, transfer_seconds=None, deadline_seconds=None)
    assert budget.memory_bytes == 300_000_000
    budget = budget_of(
        load(group('memory = "300 MB"')).report(0, 0.0),
        memory_fraction=0.5,
        transfer_seconds=None,
        deadline_seconds=None,
    )
    assert budget.memory_bytes == 150_000_000


def test_the_fleets_transfer_time_turns_links_into_payloads(load):
    report = load('transfer = "2 s"\n' + group('memory = "1 GB"\ndown = "8 Mbit/s"\nup = "4 Mbit/s"')).report(0, 0.0)
    budget = budget_of(report, memory_fraction=1.0, transfer_seconds=None, deadline_seconds=None)
    assert (budget.download_bytes, budget.upload_bytes, budget.both_ways_bytes) == (2_000_000, 1_000_000, 1_000_000)
    shorter = budget_of(report, memory_fraction=1.0, transfer_seconds=1.0, deadline_seconds=None)
    assert (shorter.download_bytes, shorter.upload_bytes) == (1_000_000, 500_000)
    unlimited = load('transfer = "2 s"\n' + group('memory = "1 GB"')).report(0, 0.0)
    assert (
        budget_of(unlimited, memory_fraction=1.0, transfer_seconds=None, deadline_seconds=None).both_ways_bytes is None
    )


DOWN = "seconds,mbit_per_s\n" + "".join(f"{second},{second + 1}\n" for second in range(50))
UP = "seconds,mbit_per_s\n" + "".join(f"{second},{100 + second}\n" for second in range(40))
TRACED = group('memory = "1 GB"\ndown_trace = "down.csv"\nup_trace = "up.csv"', count="count = 300")


def test_link_traces_run_with_simulated_time_and_start_over(load):
    fleet = load(TRACED, traces={"down.csv": DOWN, "up.csv": UP})
    start = int(fleet.report(7, 0.0).down_mbit_per_s) - 1
    for seconds in (0.0, 0.5, 1.0, 30.0, 1000.75):
        report = fleet.report(7, seconds)
        assert report.down_mbit_per_s == (start + int(seconds)) % 50 + 1
        assert report.up_mbit_per_s == (start + int(seconds)) % 40 + 100


def test_devices_start_at_different_seconds_of_their_traces_both_directions_at_the_same(load):
    fleet = load(TRACED, traces={"down.csv": DOWN, "up.csv": UP})
    links = [fleet.links(device) for device in range(300)]
    assert {link.down.offset_seconds for link in links} == set(range(40))
    assert all(link.down.offset_seconds == link.up.offset_seconds for link in links)


def test_links_and_reports_agree_at_all_times(load):
    keys = 'memory = "1 GB"\ndown_trace = "down.csv"\nup = { uniform = ["1 Mbit/s", "9 Mbit/s"], every = "round" }'
    fleet = load(group(keys, count="count = 20"), traces={"down.csv": DOWN})
    for device, seconds in enumerate(range(0, 200, 10)):
        report, links = fleet.report(device, seconds), fleet.links(device, seconds)
        assert (report.down_mbit_per_s, report.up_mbit_per_s) == (links.down.at(seconds), links.up.at(seconds))


def test_traces_are_stretched_to_a_range(load):
    keys = 'memory = "1 GB"\ndown_trace = "down.csv"\nlink_range = ["30 Mbit/s", "0.1 Gbit/s"]'
    fleet = load(group(keys), traces={"down.csv": "seconds,mbit_per_s\n0,1\n1,3\n2,5\n"})
    # From 1, 3 and 5: the lowest becomes 30, the highest 100, and 3 lies half way between.
    assert sorted(fleet.report(0, float(second)).down_mbit_per_s for second in range(3)) == [30, 65, 100]
    with pytest.raises(
        ValueError, match=r"down_trace = 'down.csv': all its values are 4, so that it cannot be stretched"
    ):
        load(group(keys), traces={"down.csv": "seconds,mbit_per_s\n0,4\n1,4\n"})


def test_a_memory_trace(load):
    fleet = load(group('memory_trace = "memory.csv"'), traces={"memory.csv": "seconds,mb\n0,500\n1,900\n2,700\n"})
    seen = [fleet.report(0, seconds).memory_available_bytes for seconds in range(6)]
    assert sorted(seen[:3]) == [500_000_000, 700_000_000, 900_000_000]
    assert seen[3:] == seen[:3]
    assert fleet.report(0, 0.0).memory_total_bytes == 900_000_000


def test_traces_are_found_beside_the_fleet_file_or_by_whole_paths(load, tmp_path, monkeypatch):
    text = group('memory = "1 GB"\ndown_trace = "lte/down.csv"')
    (tmp_path / "elsewhere" / "lte").mkdir(parents=True)
    (tmp_path / "elsewhere" / "lte" / "down.csv").write_text(DOWN)
    with pytest.raises(ValueError, match="cannot read this trace"):
        load(text)
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    assert len(load(text.replace("lte/", "~/lte/")).links(0).down.values) == 50


def share_groups(*shares):
    return "".join(
        group('memory = "1 GB"', name=f"group {index}", count=f"share = {share}") for index, share in enumerate(shares)
    )


@pytest.mark.parametrize(
    ("shares", "devices", "sizes"),
    [
        ((0.2, 0.2, 0.2, 0.2, 0.2), 100, [20, 20, 20, 20, 20]),
        ((0.2, 0.2, 0.2, 0.2, 0.2), 7, [2, 2, 1, 1, 1]),
        ((0.5, 0.3, 0.2), 11, [6, 3, 2]),
        ((0.333333, 0.333333, 0.333334), 3, [1, 1, 1]),
        ((0.7, 0.2, 0.1), 10, [7, 2, 1]),
        ((1.0,), 100_000, [100_000]),
    ],
)
def test_shares_are_rounded_to_whole_devices(load, shares, devices, sizes):
    fleet = load(share_groups(*shares), devices=devices)
    assert [len(devices_of(fleet, tier)) for tier in fleet.tiers] == sizes
    assert fleet.size == devices


def test_a_group_whose_share_rounds_to_nothing_is_no_tier(load):
    fleet = load(share_groups(0.9, 0.1), devices=2)
    assert fleet.tiers == ["group 0"]
    assert fleet.size == 2


def test_the_counts_may_be_confirmed(load):
    assert load(TWO_GROUPS, devices=5).size == 5


def test_nothing_is_stored_or_computed_per_device(load, monkeypatch):
    def footprint(value):
        """Bytes of a fleet and of everything in it."""
        total, todo, seen = 0, [value], set()
        while todo:
            one = todo.pop()
            if id(one) in seen or isinstance(one, type):
                continue
            seen.add(id(one))
            total += sys.getsizeof(one)
            if isinstance(one, list | tuple):
                todo += one
            elif isinstance(one, dict):
                todo += [*one, *one.values()]
            else:
                todo += vars(one).values() if hasattr(one, "__dict__") else []
        return total

    text = group('memory = { uniform = ["1 GB", "3 GB"] }', count="share = 0.5") + group(
        'memory = "1 GB"\nlink = { uniform = ["1 Mbit/s", "2 Mbit/s"], every = "round" }', name="b", count="share = 0.5"
    )
    hashes = []
    blake2b = fleet_module.hashlib.blake2b
    monkeypatch.setattr(fleet_module.hashlib, "blake2b", lambda *a, **k: hashes.append(1) or blake2b(*a, **k))
    fleets = {devices: load(text, devices=devices) for devices in (100, 100_000)}
    assert hashes == []
    for fleet in fleets.values():
        fleet.report(fleet.size - 1, 3.0)
        assert len(hashes) <= 2
        hashes.clear()
    # Only the integers themselves may take a few bytes more.
    assert abs(footprint(fleets[100_000]) - footprint(fleets[100])) < 64


ONE = group('memory = "1 GB"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the key 'group' is missing"),
        ("group = []", "group = []: must have 1 or more entries"),
        ("group = 3", "group = 3: must be a list"),
        ("group = [3]", "group 'number 1': it must be"),
        ("[[group]\n", "cannot read this fleet file"),
        ("sped = 3\n" + ONE, "fleet.toml: unknown key 'sped'"),
        ('referense = "1 GFLOP/s"\n' + ONE, "unknown key 'referense', did you mean 'reference'"),
        ("reference = 10\n" + ONE, "reference = 10: must be a text with a number and a unit, like '10 GFLOP/s'"),
        (
            'reference = "0 GFLOP/s"\n' + ONE,
            "fleet.toml: reference = '0 GFLOP/s': 0 must be at least 1",
        ),
        ('transfer = "2 parsec"\n' + ONE, "transfer = '2 parsec': unknown unit 'parsec'"),
        ('transfer = "0 s"\n' + ONE, "transfer = '0 s': 0 must be at least"),
        (ONE + ONE, "two groups have name = 'phones'"),
        ('[[group]]\ncount = 1\nmemory = "1 GB"\n', "group 'number 1': the key 'name' is missing"),
        (group('memory = "1 GB"', name=""), "group '': name = '': must not be empty"),
        (group('memroy = "1 GB"'), "group 'phones': unknown key 'memroy', did you mean 'memory'"),
        (group(""), "group 'phones': needs one of memory, training_memory, memory_trace, fits_width"),
        (group('memory = "1 GB"\nfits_width = 0.5'), "group 'phones': memory and fits_width exclude each other"),
        (group('memory = "1 GB"\nlink = "1 Mbit/s"\ndown = "1 Mbit/s"'), "link and down exclude each other"),
        (group('memory = "1 GB"\nup = "1 Mbit/s"\nup_trace = "x.csv"'), "up and up_trace exclude each other"),
        (group('memory = "512"'), "group 'phones': memory = '512': the unit is missing; write it like '512 MB'"),
        (group("memory = 512"), "group 'phones': memory = 512: must be a text with a number and a unit"),
        (group('memory = "-5 MB"'), "group 'phones': memory = '-5 MB': must not be negative"),
        (group('memory = { uniform = ["2 GB", "1 GB"] }'), "the lowest amount comes first"),
        (group('memory = { uniform = ["1", "2"] }'), "the unit is missing"),
        (group('memory = { trace = "m.csv" }'), "must have either 'uniform' or 'choice'"),
        (group('memory = "1 GB"\nlink = "20 Mb/s"'), "link = '20 Mb/s': unknown unit 'Mb/s', did you mean 'Mbit/s'"),
        (group('memory = "1 GB"\ndown = 20'), "down = 20: must be a text with a number and a unit, like '20 Mbit/s'"),
        (group('memory = "1 GB"\nup = "-1 Mbit/s"'), "up = '-1 Mbit/s': must not be negative"),
        (group('memory = "1 GB"\nspeed = 0'), "group 'phones': speed = 0: must be a finite number above 0"),
        (group('memory = "1 GB"\nspeed = "fast"'), "speed = 'fast': must be a finite number above 0"),
        (group('memory = "1 GB"\nspeed = { uniform = [1, inf] }'), "must be a finite number above 0"),
        (
            group('memory = "1e30 GB"'),
            "memory = '1e30 GB': 1e+39 must be at least 0 and at most 9.22337e+18",
        ),
        (
            group('memory = "1 GB"\nlink = "1e9 Gbit/s"'),
            "link = '1e9 Gbit/s': 1e+12 must be at least 0 and",
        ),
        (group('memory = "1 GB"\nspeed = 1e10'), "group 'phones': highest speed times reference = 1e+20: must be"),
        (group('memory = "1 GB"\nkind = 4'), "kind = 4: must be a text in quotes"),
        (group("fits_width = 1.5"), "fits_width = 1.5: must be at most 1"),
        (group('fits_width = 1\npayload = "1 MB"'), "group 'phones': payload and fits_width exclude each other"),
        (
            group('memory = "1 GB"\npayload = "0 B"'),
            "payload = '0 B': 0 must be at least 1",
        ),
        (group('memory = "1 GB"\npayload = 400'), "payload = 400: "),
        (group("fits_width = 0"), "fits_width = 0: must be above 0"),
        (group("fits_width = nan"), "fits_width = nan: must be"),
        (group('memory = "1 GB"', count="count = 0"), "count = 0: must be at least 1"),
        (group('memory = "1 GB"', count="count = 2.5"), "count = 2.5: must be a whole number"),
        (group('memory = "1 GB"', count="count = true"), "count = True: must be a whole number"),
        (group('memory = "1 GB"', count="count = 1\nshare = 1.0"), "count and share exclude each other"),
        (group('memory = "1 GB"', count=""), "needs one of count, share"),
        (ONE + group('memory = "1 GB"', name="b", count="share = 0.5"), "use one of them in the whole file"),
        (share_groups(0.5, 0.4), "the shares of the groups add up to 0.9: they must add up to 1"),
        (share_groups(1.0), "the groups have shares: say how many devices there are"),
        (group('memory = "1 GB"\nlink_range = ["1 Mbit/s", "2 Mbit/s"]'), "it needs down_trace or up_trace"),
        (
            group('memory = "1 GB"\ndown_trace = "x.csv"\nlink_range = ["2 Mbit/s", "1 Mbit/s"]'),
            "'2 Mbit/s' is not less than '1 Mbit/s'",
        ),
        (group('memory = "1 GB"\ndown_trace = "x.csv"\nlink_range = "1 Mbit/s"'), "must be a list of two amounts"),
        (group('memory_trace = ""'), "memory_trace = '': must not be empty"),
        (group('memory = "1 GB"\ndown_trace = "none.csv"'), "group 'phones': down_trace = 'none.csv'"),
    ],
)
def test_a_wrong_fleet_file_names_file_group_key_and_value(load, text, message):
    with pytest.raises(ValueError) as error:
        load(text)
    assert message in str(error.value)
    assert "fleet.toml" in str(error.value)


def test_all_mistakes_are_listed_at_once(load):
    with pytest.raises(ValueError) as error:
        load(group('memory = "5"') + group('memory = "1 GB"\nlink = "7"', name="boards"))
    assert [line.split(": ", 1)[1] for line in str(error.value).splitlines()] == [
        "group 'phones': memory = '5': the unit is missing; write it like '512 MB'",
        "group 'boards': link = '7': the unit is missing; write it like '20 Mbit/s'",
    ]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("seconds,mbit_per_s\n0,1\n2,1\n", "must be 1; a trace has one line per second, no gaps"),
        ("seconds,mbit_per_s\n", "the trace is empty"),
        ("seconds,mbit_per_s\n0,-1\n", "must be a finite number of at least 0"),
        ("seconds,mbit_per_s\n0,nan\n", "must be a finite number of at least 0"),
        ("seconds,mbit_per_s\n0,1\n1,1e7\n", "its highest value = 10000000.0: must be a finite number"),
        ("seconds,bytes\n0,1\n", "must be 'seconds,<unit>'"),
    ],
)
def test_a_broken_trace_names_the_group_and_the_key_too(load, trace, message):
    with pytest.raises(ValueError) as error:
        load(group('memory = "1 GB"\nup_trace = "up.csv"'), traces={"up.csv": trace})
    assert message in str(error.value)
    assert "fleet.toml: group 'phones': up_trace = 'up.csv'" in str(error.value)


def test_the_number_of_devices_must_be_that_of_the_file(load):
    with pytest.raises(ValueError, match="counts of the groups add up to 5, and devices = 120: set devices = 5"):
        load(TWO_GROUPS, devices=120)


@pytest.mark.parametrize("devices", [0, -3])
def test_a_fleet_has_devices(load, devices):
    with pytest.raises(ValueError, match=f"devices = {devices}: must be at least 1"):
        load(share_groups(1.0), devices=devices)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_the_seed_has_bounds(load, seed):
    with pytest.raises(ValueError, match=f"seed = {seed}: must be from 0"):
        load(ONE, seed=seed)


def test_a_width_needs_a_family(load):
    with pytest.raises(ValueError, match=r"group 'phones': fits_width = 0.5: needs a family with widths"):
        load(group("fits_width = 0.5"), requirement=None)


def test_a_fleet_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: cannot read this fleet file: No such file or directory$"):
        Fleet(tmp_path / "none.toml")


# Every example of the reference for users


def examples_of_the_reference():
    text = (Path(__file__).parents[2] / "docs" / "fleets.md").read_text()
    return re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)


def test_the_reference_has_examples():
    assert len(examples_of_the_reference()) >= 7


@pytest.mark.parametrize("example", examples_of_the_reference())
def test_the_examples_of_the_reference_load(load, example, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "traces").mkdir()
    traces = {
        "traces/lte-down.csv": DOWN,
        "traces/lte-up.csv": UP,
        "free-memory.csv": "seconds,mib\n0,300\n1,200\n",
    }
    fleet = load(example, traces=traces, devices=8 if "share" in example else None)
    assert all(fleet.report(devices_of(fleet, tier)[0], 0.0).memory_available_bytes > 0 for tier in fleet.tiers)


# Bundled fleets

# Of those whose groups have shares.
DEVICES = {"digits-demo": 20, "five-memories": 100}


def bundled(name, **arguments):
    return Fleet(bundled_fleet(name), **{"seed": 0, "requirement": requirement, **arguments})


def test_a_bundled_fleet_by_its_name():
    assert bundled_fleet("digits-demo") == FLEETS_DIR / "digits-demo.toml"
    with pytest.raises(ValueError, match="no fleet 'digit-demo' comes with the project, did you mean 'digits-demo'"):
        bundled_fleet("digit-demo")


@pytest.mark.parametrize(("devices", "sizes"), [(20, [2, 3, 5, 5, 5]), (6, [1, 1, 2, 1, 1])])
def test_the_demos_fleet_has_as_many_devices_as_are_asked_for(devices, sizes):
    fleet = bundled("digits-demo", devices=devices)
    assert [len(devices_of(fleet, tier)) for tier in fleet.tiers] == sizes


@pytest.mark.parametrize("name", sorted(path.stem for path in FLEETS_DIR.glob("*.toml")))
def test_every_bundled_fleet_gives_usable_devices(name):
    fleet = bundled(name, devices=DEVICES.get(name))
    for tier in fleet.tiers:
        device = devices_of(fleet, tier)[0]
        budget = budget_of(fleet.report(device, 0.0), memory_fraction=0.8, transfer_seconds=60.0, deadline_seconds=None)
        assert budget.memory_bytes > 0
        assert budget.both_ways_bytes > 0


@pytest.mark.parametrize("name", sorted(path.stem for path in FLEETS_DIR.glob("*.toml")))
def test_no_bundled_fleet_depends_on_the_method(name):
    few, many = (bundled(name, devices=DEVICES.get(name), requirement=lambda _, n=n: (n, n)) for n in (1, 10**9))
    assert few.most_bytes == many.most_bytes


def test_five_memories_have_a_fifth_each():
    fleet = bundled("five-memories", devices=100)
    assert [len(devices_of(fleet, tier)) for tier in fleet.tiers] == [20] * 5
    limits = [fleet.report(20 * index, 0.0).memory_limit_bytes for index in range(5)]
    assert limits == [16_000_000, 8_000_000, 4_000_000, 3_000_000, 2_400_000]


def test_the_testbed_has_four_boards_of_three_kinds():
    fleet = bundled("hypemefed-testbed")
    kinds = [fleet.report(device, 0.0).kind for device in range(fleet.size)]
    assert kinds == ["raspberry-pi-4"] * 4 + ["jetson-nano"] * 4 + ["jetson-tx2"] * 4


def test_a_file_may_begin_with_a_mark_of_its_encoding(load, tmp_path):
    assert len(load(f"\ufeff{TWO_GROUPS}").tiers) == len(load(TWO_GROUPS).tiers)
    (tmp_path / "fleet.toml").write_text(TWO_GROUPS, encoding="utf-16")
    with pytest.raises(ValueError, match=r"it is not in UTF-8 \(byte 1\): save it so"):
        Fleet(tmp_path / "fleet.toml", seed=3, requirement=requirement)
