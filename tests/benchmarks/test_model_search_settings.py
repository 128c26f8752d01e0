"""The six settings of dynamic model search: every cell that the paper prints is typed here, as it is printed.

What of our files differs is listed in benchmarks/model_search/deviations.py with its reason, and nothing else may.
"""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_search import deviations
from wildflower.devices.budget import budget_of
from wildflower.devices.fleet import FLEETS_DIR, Fleet
from wildflower.launch.experiment_file import resolve
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.strategies.model_search import ModelSearch
from wildflower.strategies.model_search_params import layer_shares
from wildflower.strategies.pricing import fits
from wildflower.tasks.shakespeare import SEQUENCE

FOLDER = Path("benchmarks/model_search")
SETTINGS = Path("wildflower/papers/model_search")
TRACES = Path(__file__).parents[3] / "shared" / "traces" / "lte"

HETEROFL = ("resnet18", {"rate": 0.0625})  # "ResNet18 with channels pruned to 6.25 %", FedRolex's too
WHOLE_RESNET18: tuple[str, dict[str, Any]] = ("resnet18", {})
DIRICHLET, IID, NATURAL = ("dirichlet", 0.1), ("iid", None), ("natural", None)
SIXTEENTHS, HALVES = (0, 0.0625, 0.125, 0.25, 0.5, 1), (0, 0.5, 1)

# Section 4.1.1, 3.2 and appendix E: of all settings.
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight decay": 5e-4, "schedule": "steps", "decay factor": 0.1}
ADAMW = {"optimizer": "adamw", "betas": (0.9, 0.99), "weight decay": 0.01, "schedule": "cosine"}
ALL = {
    "batch size": 64,
    "largest number of draws": 5,
    "epsilon": 0.8,
    "steps of distillation": 100,
    "learning rate of distillation": 1e-3,
    "batch size of distillation": 64,  # "K is the batch size"
    "students of distillation": "random",  # "we randomly sample n subnets"
    "schedule of distillation": "constant",  # appendix E.2 prints one rate
    "seconds that weights may travel": None,
    "speed, of 100 GFLOP/s": None,
}
CIFAR = ALL | {"data set": "cifar10", "resolution": 32}
# Tables 1 and 2, section 4.1, appendices E and G.3. None: nothing is printed, or the cell is lost in our copy.
TABLE_1 = ("devices", "devices per round", "local epochs", "partition")
REST = ("shares", "rounds", "learning rate", "decay rounds")
PRINTED: dict[str, dict[str, Any]] = {
    "s1": CIFAR
    | SGD
    | dict(zip(TABLE_1, (100, 10, None, DIRICHLET), strict=True))
    | dict(zip(REST, (SIXTEENTHS, 800, 0.1, (300, 500)), strict=True))
    | {"shards of equal size": True, "largest model": "resnet18"},
    "s2": CIFAR
    | SGD
    | dict(zip(TABLE_1, (100, 10, None, DIRICHLET), strict=True))
    | dict(zip(REST, (SIXTEENTHS, 2500, 2e-4, (800, 1250)), strict=True))
    | {"shards of equal size": True, "largest model": "resnet18"},
    "s3": CIFAR
    | SGD
    | dict(zip(TABLE_1, (50, 50, None, IID), strict=True))
    | dict(zip(REST, (HALVES, None, 0.1, (150, 250)), strict=True))
    | {"shards of equal size": True, "largest model": "resnet34"},
    "s4": CIFAR
    | SGD
    | dict(zip(TABLE_1, (100, 10, 5, DIRICHLET), strict=True))
    | dict(zip(REST, (HALVES, None, 0.1, (300, 500)), strict=True))
    | {"shards of equal size": True, "largest model": "resnet152"},
    "s5": ALL
    | ADAMW
    | dict(zip(TABLE_1, (3597, 120, 5, NATURAL), strict=True))
    | dict(zip(REST, ((0, 1), None, 1e-3, ()), strict=True))
    | {"data set": "femnist", "resolution": 32, "logs": ("Wi-Fi",)}
    | {"largest model": "vit-tiny", "blocks of the smallest model": 1},
    "s6": ALL
    | SGD
    | dict(zip(TABLE_1, (1128, 120, None, NATURAL), strict=True))
    | dict(zip(REST, (HALVES, None, 0.1, (10, 20)), strict=True))
    | {"data set": "shakespeare", "sequence length": 80, "logs": ("4G/LTE", "Wi-Fi"), "largest model": "bert"}
    | {"blocks of the smallest model": 6, "hidden size of the smallest model": 256, "heads of the smallest model": 6},
}
SMALLEST: dict[str, tuple[str, dict[str, Any]]] = {
    **{"s1": HETEROFL, "s2": HETEROFL, "s3": WHOLE_RESNET18, "s4": WHOLE_RESNET18},
    **{"s5": ("vit-tiny", {"layers": 1}), "s6": ("bert", {"tiny": True})},
}
MBIT_PER_S = {"s1": (1, 180), "s2": (1, 180), "s3": (180, 360), "s4": (180, 1000), "s5": (30, 100), "s6": (0, 110)}
MEMORY_GB = {"s1": (1.5, 2), "s2": (1.5, 2), "s3": (2, 3), "s4": (2, 6), "s5": (1.5, 2), "s6": (4, 8)}


def configured(name):
    """A setting as `wildflower paper` has it, but for settings 5 and 6 with logs of links in place of draws."""
    logs = [f"fleet={FOLDER / f'{name}-fleet.toml'}"] if name in ("s5", "s6") else []
    return resolve(SETTINGS / f"setting-{name[1:]}.toml", logs).config


def fleet_file(config):
    bundled = FLEETS_DIR / f"{config.fleet}.toml"
    return bundled if bundled.is_file() else Path(config.fleet)


@pytest.fixture(params=sorted(PRINTED))
def setting(request):
    """A setting's name and its configuration."""
    return request.param, configured(request.param)


# The settings with logs are read with the real ones where they are, and everywhere with a short one of their format.
WITH_LOGS = [
    *((name, False) for name in sorted(PRINTED)),
    *((name, True) for name in sorted(PRINTED) if "logs" in PRINTED[name] and TRACES.is_dir()),
]


@pytest.fixture(params=WITH_LOGS, ids=lambda case: f"{case[0]}-{'real-logs' if case[1] else 'short-logs'}")
def setting_and_fleet(request, tmp_path):
    """A setting's name, its configuration and its fleet."""
    name, real = request.param
    config = configured(name)
    return name, config, fleet_of(config, None if real else tmp_path)


def fleet_of(config, folder):
    """The fleet of a configuration; with a folder a log of three seconds stands in place of each of the real ones."""
    file = fleet_file(config)
    if folder is not None:
        (folder / "project" / FOLDER).mkdir(parents=True)
        file = Path(shutil.copy(file, folder / "project" / FOLDER / "fleet.toml"))
        logs = folder / "shared" / "traces" / "lte"
        logs.mkdir(parents=True)
        for name in ("ATT-LTE-driving-down", "TMobile-LTE-driving-down"):
            (logs / f"{name}.csv").write_text("seconds,mbit_per_s\n0,2.5\n1,0.5\n2,10\n")
    return Fleet(file, devices=config.devices, seed=1, requirement=None)


def input_of(config):
    """Shape of an input and number of classes. CIFAR-10's images are of 32x32 themselves."""
    if config.task == "shakespeare":
        return [SEQUENCE], 84
    return ([3, 32, 32], 10) if config.task == "cifar10" else ([1, *config.own_task_arguments().size], 62)


def cells(config):
    """What our files have in every cell."""
    shape, _ = input_of(config)
    search, distillation = config.params, config.shared["distillation"]
    fleet = tomllib.loads(fleet_file(config).read_text())
    assert fleet["reference"] == "100 GFLOP/s"
    (speed,) = {tuple(group["speed"]["uniform"]) for group in fleet["group"]}
    assert (config.local_steps, config.budget.transfer_seconds) == (0, 0)  # else these counted
    found = {
        "devices": config.devices,
        "devices per round": config.devices_per_round,
        "local epochs": config.local_epochs,
        "data set": config.task,
        "partition": (config.partition, config.alpha if config.partition == "dirichlet" else None),
        "largest model": config.family,
        "shares": search.shares,
        "rounds": config.rounds,
        "batch size": config.batch_size,
        "optimizer": config.optimizer,
        "learning rate": config.learning_rate,
        "weight decay": config.weight_decay,
        "schedule": config.schedule.kind,
        "decay rounds": config.schedule.decay_rounds,
        "largest number of draws": search.max_draws,
        "epsilon": search.epsilon,
        "steps of distillation": ModelSearch.distillation_steps if distillation.steps < 0 else distillation.steps,
        "learning rate of distillation": distillation.learning_rate,
        "batch size of distillation": distillation.batch_size,
        "students of distillation": distillation.students,
        "schedule of distillation": distillation.schedule,
        "seconds that weights may travel": float(fleet["transfer"].removesuffix(" s")),
        "speed, of 100 GFLOP/s": speed,
    }
    if config.optimizer == "sgd":
        found |= {"momentum": config.momentum, "decay factor": config.schedule.decay_factor}
    else:
        found |= {"betas": config.adam.betas}
    if len(shape) == 1:
        found |= {"sequence length": shape[0]}
    else:
        assert shape[1] == shape[2]
        found |= {"resolution": shape[1]}
    if config.task == "cifar10":
        # "dirichlet" draws each device's share of every class, so that devices differ in size.
        found |= {"shards of equal size": config.partition == "iid"}
    if logs := [group["down_trace"] for group in fleet["group"] if "down_trace" in group]:
        assert logs == [group["up_trace"] for group in fleet["group"]]
        found |= {"logs": tuple(Path(log).stem for log in logs)}
    if config.family in ("vit-tiny", "bert"):
        family = built(config, config.family)
        widths = dict(zip(family.groups, smallest_of_space(config).widths, strict=True))
        heads = [width for name, width in widths.items() if name.endswith(".heads") and width]
        found |= {"blocks of the smallest model": len(heads)}
        if config.family == "bert":
            found |= {"hidden size of the smallest model": widths["stream"], "heads of the smallest model": heads[0]}
    return found


def built(config, name, **arguments):
    shape, classes = input_of(config)
    return make_family({"name": name, "input_shape": shape, "classes": classes, **arguments})


def cost_of(config, family, architecture):
    optimizer = "sgd-momentum" if config.optimizer == "sgd" else config.optimizer
    return cost(family, architecture, batch_size=64, optimizer=optimizer)


def smallest_cost(config, printed):
    """What the smallest model of Table 2 costs."""
    name, of = printed
    if "tiny" in of:  # 6 layers of hidden size 256; with 4 heads, for the printed 6 do not divide it
        family = built(config, name, hidden=256, depth=6, heads=4, mlp=1024)
        return cost_of(config, family, family.full())
    family = built(config, name, **({"activation": "relu6"} if name == "resnet18" else {}))
    if "layers" in of:
        return cost_of(config, family, family.first_layers(of["layers"]))
    return cost_of(config, family, family.width(of.get("rate", 1.0)))


def smallest_of_space(config):
    search, family = config.params, built(config, config.family, **resnet_arguments(config))
    return Space.of(family, search.shares, min_blocks=search.min_blocks).smallest()


def resnet_arguments(config):
    return tomllib.loads(config.family_arguments.replace(", ", "\n"))


def reports(fleet):
    """Of all devices, or of a hundred or so from the first to the last, at ten moments; of two over 800 seconds.

    No log is longer.
    """
    devices = range(0, fleet.size, max(1, fleet.size // 100))
    found = [fleet.report(device, float(moment)) for device in devices for moment in range(10)]
    return found + [fleet.report(device, float(second)) for device in (0, fleet.size - 1) for second in range(800)]


def budget(report, config):
    return budget_of(
        report,
        memory_fraction=config.budget.memory_fraction,
        transfer_seconds=config.budget.transfer_seconds or None,
        deadline_seconds=None,
    )


def test_every_setting_has_its_file():
    found = SETTINGS.glob("setting-?.toml")
    assert sorted(path.stem.replace("setting-", "s") for path in found) == sorted(PRINTED)


def test_every_cell_is_as_printed_or_is_listed_with_its_reason(setting):
    name, config = setting
    printed, ours = PRINTED[name], cells(config)
    assert ours.keys() == printed.keys()
    found = {cell: (printed[cell], ours[cell]) for cell in printed if printed[cell] != ours[cell]}
    listed = [one for one in deviations.DEVIATIONS if one.setting == name]
    assert found == {one.cell: (one.printed, one.ours) for one in listed}
    assert len(found) == len(listed)
    assert all(one.why for one in listed)


def test_the_deviations_stand_on_the_page():
    page = (FOLDER / "details.md").read_text()
    shown = page.partition("<!-- deviations -->\n\n")[2].partition("\n\n<!-- end of deviations -->")[0]
    assert shown == deviations.table()


def test_what_a_fleet_may_spend_is_the_range_of_table_2(setting_and_fleet):
    name, config, fleet = setting_and_fleet
    assert fleet.size == config.devices
    said = reports(fleet)
    low, high = MBIT_PER_S[name]
    margin = 0.02 * (high - low)
    for rates in ([r.down_mbit_per_s for r in said], [r.up_mbit_per_s for r in said]):
        assert low <= min(rates) <= low + margin
        assert high - margin <= max(rates) <= high
    low, high = (gigabytes * 1e9 for gigabytes in MEMORY_GB[name])
    memory = {report.memory_limit_bytes for report in said}
    assert low <= min(memory) <= low + 0.02 * (high - low)
    assert high - 0.02 * (high - low) <= max(memory) <= high
    if name == "s6":  # printed as {4, 8}: two values, not a range
        assert memory == {4_000_000_000, 8_000_000_000}


def test_the_smallest_model_fits_everyone_and_links_carry_the_largest(setting_and_fleet):
    name, config, fleet = setting_and_fleet
    smallest = smallest_cost(config, SMALLEST[name])
    family = built(config, config.family)
    largest = cost_of(config, family, family.full())
    found = [budget(report, config) for report in reports(fleet)]
    assert all(smallest.peak_training_memory_bytes <= one.memory_bytes for one in found)
    if MBIT_PER_S[name][0] > 0:
        assert all(smallest.payload_bytes <= one.both_ways_bytes for one in found)
    payload = max(one.both_ways_bytes for one in found)
    assert largest.payload_bytes <= payload < 1.25 * largest.payload_bytes
    assert min(one.both_ways_bytes for one in found) < largest.payload_bytes


@pytest.mark.parametrize("name", [name for name in sorted(PRINTED) if "logs" in PRINTED[name] and TRACES.is_dir()])
def test_a_rate_is_the_logs_stretched_to_the_printed_range(name):
    """By hand from the file: the first device's first hundred seconds, and those after the log has started over."""
    config = configured(name)
    fleet = fleet_of(config, None)
    group = tomllib.loads(fleet_file(config).read_text())["group"][0]
    lines = (TRACES / Path(group["down_trace"]).name).read_text().splitlines()[1:]
    log = [float(line.split(",")[1]) for line in lines]
    assert [line.split(",")[0] for line in lines[:3]] == ["0", "1", "2"]
    low, high = MBIT_PER_S[name]
    stretched = [low + (high - low) * (rate - min(log)) / (max(log) - min(log)) for rate in log]
    seconds = [*range(100), *range(len(log), len(log) + 100)]
    offsets = [
        offset
        for offset in range(len(log))
        if all(
            fleet.report(0, float(s)).down_mbit_per_s == pytest.approx(stretched[(s + offset) % len(log)], abs=1e-6)
            for s in seconds[:5]
        )
    ]
    assert offsets  # a device starts somewhere in the log
    for second in seconds:
        expected = stretched[(second + offsets[0]) % len(log)]
        assert fleet.report(0, float(second)).down_mbit_per_s == pytest.approx(expected, abs=1e-6)


def test_the_smallest_of_the_space_is_no_larger_than_the_printed_one(setting):
    name, config = setting
    family = built(config, config.family, **resnet_arguments(config))
    smallest = cost_of(config, family, smallest_of_space(config))
    assert smallest.payload_bytes <= 1.001 * smallest_cost(config, SMALLEST[name]).payload_bytes
    assert config.params.layer_shares == ""


@pytest.mark.parametrize("name", ["s1", "s2"])
def test_a_fifth_of_the_devices_has_what_each_of_heterofls_complexities_needs(name):
    config = configured(name)
    family = built(config, "resnet18", **resnet_arguments(config))
    fleet = fleet_of(config, None)
    for seconds in (0.0, 100.0):
        counts = dict.fromkeys((1, 0.5, 0.25, 0.125, 0.0625), 0)
        for device in range(fleet.size):
            allowed = budget(fleet.report(device, seconds), config)
            counts[next(w for w in counts if fits(cost_of(config, family, family.width(w)), allowed))] += 1
        assert set(counts.values()) == {20}


def test_the_rest_that_the_paper_says(setting):
    _, config = setting
    assert (config.strategy, config.params.searcher) == ("model-search", "pool")
    assert config.below_smallest == "smallest"  # "in the worst cases, the smallest model will be chosen"
    assert not config.params.masked_loss
    if config.family.startswith("resnet"):
        assert resnet_arguments(config) == {"norm": "batch", "activation": "relu6"}


def test_the_space_of_the_public_code():
    """At least two blocks of each stage; widths 1/2 and 1 in stages 1 and 2, and elsewhere all channels."""
    config = resolve(FOLDER / "public-code.toml", []).config
    arguments = resnet_arguments(config)
    assert arguments == {"norm": "batch", "activation": "relu6", "preactivation": True}
    family = built(config, config.family, **arguments)
    space = Space.of(family, config.params.shares, layer_shares(config.params.layer_shares), config.params.min_blocks)
    for choice in space.choices:
        if choice.name.startswith(("stage1_", "stage2_")):
            assert set(choice.shares) - {0} == {0.5, 1}
        else:
            assert set(choice.shares) - {0} == {1}
        assert (0 in choice.shares) == (choice.name in family.removable)
    widths = dict(zip(family.groups, space.smallest().widths, strict=True))
    kept = [sum(widths[f"{block}.inner1"] > 0 for block in blocks) for blocks in family.stages.values()]
    assert kept == [2, 2, 2, 2]
