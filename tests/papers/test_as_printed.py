"""What the papers print of their experiments, typed from their texts, against the files.

Model search has a test of its own, tests/benchmarks/test_model_search_settings.py.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from wildflower.cli.papers import configured
from wildflower.cli.plan import make_plan
from wildflower.devices.fleet import FLEETS_DIR
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.papers.catalog import entry, full_size, tiny


def first(name: str) -> Any:
    """The configuration of an experiment's last row, which is the paper's method."""
    one = entry(name)
    return configured(one, one.methods()[-1], [])


def groups(config: Any) -> list[int]:
    """How many devices each group of the fleet has."""
    file = Path(config.fleet) if config.fleet.endswith(".toml") else FLEETS_DIR / f"{config.fleet}.toml"
    return [group["count"] for group in tomllib.loads(file.read_text())["group"]]


# RecipFL, Table 2 and section 5.1: data set, strong and weak devices, percent of the data of a strong one, rounds.
RECIPFL = {
    "table-3-cifar10-depth": ("cifar10", 1, 5, 50, 50),
    "table-3-cifar10-width": ("cifar10", 1, 5, 50, 50),
    "table-3-cifar100-depth": ("cifar100", 1, 50, 50, 500),
    "table-3-cifar100-width": ("cifar100", 1, 50, 50, 500),
    "table-3-mnist": ("mnist", 2, 100, 25, 100),
    "table-3-mnli": ("glue-mnli", 1, 20, 50, 50),
}


@pytest.mark.parametrize("name", RECIPFL)
def test_recipfl_table_2(name):
    config = first(f"recipfl/{name}")
    data, strong, weak, percent, rounds = RECIPFL[name]
    assert (config.task, groups(config), config.rounds) == (data, [strong, weak], rounds)
    assert 100 * config.strong.share / strong == percent
    assert config.devices_per_round == min(strong + weak, 10)  # "|S_t| = min(M, 10) clients"
    assert (config.partition, config.alpha) == ("strong-and-weak", 0.5)  # "Dir(alpha = 0.5)"
    # "we report the accuracy of the last 20% rounds"
    assert config.rounds - config.personal.first_round + 1 == config.rounds / 5


@pytest.mark.parametrize(
    ("family", "arguments", "shape", "classes", "printed"),
    [
        ("resnet18", {}, [3, 32, 32], 10, 11e6),
        ("resnet18", {"depth": 1}, [3, 32, 32], 10, 450e3),
        ("resnet18", {"stage_channels": [12, 25, 51, 102]}, [3, 32, 32], 10, 444e3),
        ("densenet121", {}, [3, 32, 32], 100, 1e6),
        ("densenet121", {"depth": 1}, [3, 32, 32], 100, 258e3),
        ("densenet121", {"growth": 6}, [3, 32, 32], 100, 276e3),
        ("lenet5", {}, [1, 28, 28], 10, 44e3),
        ("lenet5", {"conv_channels": [6, 3], "hidden": [84]}, [1, 28, 28], 10, 5.6e3),
    ],
)
def test_recipfls_models_have_as_many_parameters_as_table_2_says(family, arguments, shape, classes, printed):
    made = make_family({"name": family, "input_shape": shape, "classes": classes, **arguments})
    assert cost(made, made.full(), batch_size=1, optimizer="sgd").parameters == pytest.approx(printed, rel=0.04)


# HypeMeFed, section 5.1: data set, devices per group, learning rate, batch size, channels.
HYPEMEFED = {
    "figure-7-svhn": ("svhn", [17, 17, 16], 0.0005, 128, (32, 64, 128, 256)),
    "figure-7-stl10": ("stl10", [17, 17, 16], 0.0005, 32, (64, 128, 256, 512)),
    "figure-7-unimib": ("unimib-shar", [10, 10, 10], 0.005, 16, (64, 128, 256, 512)),
}


@pytest.mark.parametrize("name", HYPEMEFED)
def test_hypemefed_section_5_1(name):
    config = first(f"hypemefed/{name}")
    data, devices, rate, batch, channels = HYPEMEFED[name]
    assert (config.task, groups(config), config.learning_rate, config.batch_size) == (data, devices, rate, batch)
    assert (config.rounds, config.local_epochs, config.optimizer) == (300, 5, "adam")
    assert config.devices_per_round == sum(devices) / 5  # "20% of the clients were uniformly selected"
    assert config.family_arguments == f"block_channels = {list(channels)}, exits = [1, 2, 3]"
    assert config.params.rank == 100
    assert config.params.epochs == 25
    assert config.params.learning_rate == 0.0005


def test_hypemefeds_other_experiments():
    assert entry("hypemefed/figure-8-svhn").values() == {"alpha": ["0.1", "0.5", "1", "10000"]}
    ranks = [
        configured(entry("hypemefed/table-1"), row, []).params.rank for row in entry("hypemefed/table-1").methods()
    ]
    assert ranks[:4] == [25, 50, 100, 200]
    assert ranks[4] >= 512  # all: no weight of the network has more
    preliminary = first("hypemefed/figure-3")
    assert (groups(preliminary), preliminary.devices_per_round) == ([17, 17, 16], 10)
    assert (preliminary.task, preliminary.partition) == ("fashion-mnist", "iid")
    ten = first("hypemefed/figure-14")
    assert (groups(ten), ten.task) == ([5] * 10, "fashion-mnist")
    assert groups(first("hypemefed/figure-15")) == [4, 4, 4]
    # Weak, moderate and ample boards have the models of the other experiments' three groups (section 5.5).
    payloads = [
        [group["payload"] for group in tomllib.loads(Path(first(f"hypemefed/{name}").fleet).read_text())["group"]]
        for name in ("figure-15", "figure-7-unimib")
    ]
    assert payloads[0] == payloads[1]
    assert first("hypemefed/figure-13").task == "cifar100"


# InclusiveFL, section 4: GLUE over 1,000 devices in equal parts of three types, a fraction of 0.02 per round, R = 1000.
@pytest.mark.parametrize("name", ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"])
def test_inclusivefl_on_glue(name):
    config = first(f"inclusivefl/table-2-{name}")
    assert (config.task, config.partition, config.devices) == (f"glue-{name}", "iid", 1000)
    assert (config.devices_per_round, config.rounds) == (1000 * 0.02, 1000)
    assert groups(config) == [334, 333, 333]
    assert "depths = [4, 8, 12]" in config.family_arguments
    assert (config.params.momentum, config.params.server) == (0.2, "adam")


def test_inclusivefl_on_medical_entities_and_by_proportion():
    config = first("inclusivefl/table-3")
    assert (config.rounds, config.local_steps, config.batch_size) == (100, 5, 64)
    assert (config.params.momentum, config.params.head) == (0.5, "own")
    table = entry("inclusivefl/table-5")
    shares = {row.name: groups(configured(table, row, [])) for row in table.methods()}
    assert shares["inclusivefl-1-2-7"] == [100, 200, 700]
    assert shares["inclusivefl-7-2-1"] == [700, 200, 100]
    for name, share, head in (("figure-6", "none", "type"), ("figure-6-medical", "layers", "own")):
        found = [
            configured(entry(f"inclusivefl/{name}"), row, []).params for row in entry(f"inclusivefl/{name}").methods()
        ]
        assert [params.momentum for params in found] == [0, 0.2, 0.5, 0.8, 1]
        assert {(params.share, params.head) for params in found} == {(share, head)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["figure-5-cola", "figure-5-medical"])
def test_inclusivefl_without_one_type_of_devices(name, tmp_path):
    """Nobody of that type can train the smallest model, and the other two get what they get with it."""
    one = entry(f"inclusivefl/{name}")
    models = {}
    for row in one.methods():
        planned = make_plan(configured(one, row, tiny(one, row, tmp_path)))
        models[row.name] = {device.tier: device.parameters for device in planned.devices}
    whole = models.pop("inclusivefl")
    assert models.pop("without-momentum") == whole
    assert list(models) == ["without-weak", "without-medium", "without-strong"]
    for row, layers in zip(models, ("4 layers", "8 layers", "12 layers"), strict=True):
        assert models[row] == whole | {layers: 0}
    assert 0 < of_layers(whole, 4) == of_layers(whole, 8)


def of_layers(parameters: dict[str, int], least: int) -> int:
    """How many parameters the four layers have that a device of so many layers lacks, and the next one has."""
    return parameters[f"{least + 4} layers"] - parameters[f"{least} layers"]


@pytest.mark.parametrize("number", [0, -1])
def test_inclusivefl_types_get_four_eight_and_twelve_layers(number, tmp_path):
    one = entry("inclusivefl/table-5")
    row = [row for row in one.methods() if row.name.startswith("inclusivefl-")][number]
    planned = make_plan(configured(one, row, tiny(one, row, tmp_path)))
    parameters = {device.tier: device.parameters for device in planned.devices}
    assert 0 < of_layers(parameters, 4) == of_layers(parameters, 8)


@pytest.mark.thorough
def test_the_medical_entities_are_planned_at_full_size(tmp_path):
    one = entry("inclusivefl/table-3")
    row = one.methods()[-1]
    planned = make_plan(configured(one, row, full_size(one, row, tmp_path)))
    parameters = {device.tier: device.parameters for device in planned.devices}
    # RoBERTa-base has 7,087,872 in each layer.
    assert of_layers(parameters, 4) == of_layers(parameters, 8) == 4 * 7_087_872


# RaFL, Tables 1 to 4 and section 4.5: data set, devices, share of them per round.
RAFL = {
    "table-2-resnet": ("cifar100", 100, 0.1),
    "table-3-mobilenet-v2": ("cifar100", 100, 0.1),
    "table-4-cifar100": ("cifar100", 100, 0.1),
    "table-4-cifar10": ("cifar10", 30, 0.4),
    "figure-7-sporadic": ("cifar100", 100, 0.1),
}


@pytest.mark.parametrize("name", RAFL)
def test_rafls_federations(name):
    config = first(f"rafl/{name}")
    data, devices, share = RAFL[name]
    assert (config.task, config.devices, config.devices_per_round) == (data, devices, devices * share)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("table-1-cifar100", [28, 51]),
        ("table-1-cifar10", [28]),
        ("table-2-resnet", [47, 74]),
        ("table-2-mobilenet", [12, 6.5]),
        ("table-3-resnet", [50, 80]),  # 5 and 8 GFLOPs over 100 devices
        ("table-3-mobilenet-v3", [7]),  # 0.7 GFLOPs
        ("figure-4", [152]),
    ],
)
def test_rafls_budgets_are_the_printed_mflops_in_the_mean_and_lie_in_the_space(name, printed):
    one = entry(f"rafl/{name}")
    found = [configured(one, row, []) for row in one.methods() if row.name.startswith("rafl")]
    assert [sum(config.params.macs) / 2e6 for config in found] == pytest.approx(printed)
    for config in found:
        kind = {"name": config.family, "input_shape": [3, 32, 32], "classes": 100, "norm": "batch", "halvings": 5}
        family = make_family(kind)
        space = ElasticSpace.of(family)
        assert family.inference_macs(space.smallest()) <= config.params.macs[0]
        assert config.params.macs[1] <= family.inference_macs(space.largest())


@pytest.mark.parametrize(
    ("table", "row", "printed"),
    [
        ("table-3-resnet", "fedavg-27", 2.75e9),
        ("table-3-resnet", "fedavg-50", 5.02e9),
        ("table-3-mobilenet-v3", "fedavg-5", 0.49e9),
    ],
)
def test_rafls_uniform_networks_of_table_3_use_the_printed_flops_over_100_devices(table, row, printed):
    one = entry(f"rafl/{table}")
    config = configured(one, {row.name: row for row in one.methods()}[row], [])
    family = make_family(
        {"name": config.family, "input_shape": [3, 32, 32], "classes": 100, "norm": "batch", "halvings": 5}
    )
    macs = family.inference_macs(family.width(config.widths[0]))
    assert config.devices * macs == pytest.approx(printed, rel=0.02)


# Tables 1 and 2: GB that RaFL's knowledge network and a uniform network take in a round. Figure 4 is taken to be alike.
RAFL_BYTES = {
    ("table-1-cifar100", "rafl-28", "fedavg-40"): (0.66, 0.85),
    ("table-1-cifar100", "rafl-51", "fedavg-76"): (1.07, 1.6),
    ("table-1-cifar10", "rafl-28", "fedavg-40"): (2.2, 3.4),
    ("table-2-resnet", "rafl-47", "fedavg-40"): (0.66, 0.85),
    ("table-2-resnet", "rafl-74", "fedavg-76"): (0.80, 1.6),
    ("table-2-mobilenet", "rafl-12", "fedavg-15"): (0.180, 0.280),
    ("table-2-mobilenet", "rafl-6", "fedavg-9"): (0.140, 0.230),
    ("figure-4", "rafl-152", "fedavg-152"): (0.80, 1.6),
}


@pytest.mark.parametrize(("table", "ours", "uniform"), RAFL_BYTES)
def test_rafls_knowledge_networks_have_the_printed_share_of_parameters(table, ours, uniform):
    one = entry(f"rafl/{table}")
    rows = {row.name: row for row in one.methods()}

    def parameters(row: str) -> int:
        config = configured(one, rows[row], [])
        kind = {"name": config.family, "norm": "batch", "halvings": 5}
        family = make_family(kind | {"input_shape": [3, 32, 32], "classes": int(config.task.removeprefix("cifar"))})
        width = config.params.knowledge_width if row == ours else config.widths[0]
        return sum(weight.numel() for weight in family.build(family.width(width)).parameters())

    smaller, larger = RAFL_BYTES[table, ours, uniform]
    assert parameters(ours) / parameters(uniform) == pytest.approx(smaller / larger, rel=0.03)


def test_model_searchs_other_criteria_and_qsgd():
    """Section 4.3 and appendix G.4: "We apply this process to our methods and FedAvg"."""
    spaces = entry("model_search/section-4-4")
    found = {row.name: configured(spaces, row, []) for row in spaces.methods()}
    assert [found[name].params.criterion for name in ("memory", "bandwidth")] == ["memory", "bandwidth"]
    one = entry("model_search/figure-15")
    wires = {row.name: configured(one, row, []).wire for row in one.methods()}
    assert wires == {"fedavg": "float32", "fedavg-qsgd": "qsgd", "search": "float32", "search-qsgd": "qsgd"}


def test_model_searchs_section_4_2_and_figure_13():
    """A fifth of the devices each that can train HeteroFL's widths; ResNets on devices whose budgets stay."""
    fifths = tomllib.loads(Path(first("model_search/section-4-2").fleet).read_text())["group"]
    assert [(group["share"], group["fits_width"]) for group in fifths] == [
        (0.2, width) for width in (1, 0.5, 0.25, 0.125, 0.0625)
    ]
    config = first("model_search/figure-13")
    assert (config.task, config.alpha, config.local_epochs) == ("cifar10", 0.1, 5)
    assert (config.devices, config.devices_per_round) == (100, 10)
    assert config.params.use == "exclusive"
    [group] = tomllib.loads(Path(config.fleet).read_text())["group"]
    assert "every" not in group["training_memory"]  # "The resources limitation on each client is fixed"


def test_rafl_at_scale():
    assert (first("rafl/figure-7-scaled").task, first("rafl/figure-7-scaled").devices) == ("femnist", 3000)
    fleet = tomllib.loads(Path(first("rafl/figure-7-sporadic").fleet).read_text())
    assert fleet["replaced_per_round"] == 0.1  # "we uniformly replace 10% of clients with new ones"
    config = first("rafl/figure-7-sporadic")
    # "the total clients flowing through the sporadic FL setting equalling 3500"
    assert config.devices + 0.1 * config.devices * (config.rounds - 1) == pytest.approx(3500, abs=100)
