import re
from dataclasses import replace

import pytest
import torch

from benchmarks.model_search.model_search_controls import ByExamples
from tests.small_run import connected_grid, simulated_grid, small_config, started
from tests.strategies.by_hand import setup
from wildflower.client_app import prepared, training_message
from wildflower.client_app import work as client_module
from wildflower.devices.budget import Budget
from wildflower.devices.resource_report import DeviceReport
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.messages.sums import WeightedSum, flatten
from wildflower.models.cnn import Cnn3
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.resnet import ResNet18
from wildflower.server_app.config import ConfigError
from wildflower.strategies import METHODS
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.distillation import Distillation
from wildflower.strategies.method import Order, Trained, Training
from wildflower.strategies.model_search import ModelSearch, ModelSearchParams
from wildflower.strategies.model_search_params import layer_shares
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod

SEARCH = {
    "strategy": "model-search",
    "model-search.shares": "0, 0.25, 0.5, 1",
    "model-search.searcher": "exact",
    "model-search.masked-loss": True,
    "model-search.norm": "static",
    "distillation.steps": 0,
    "family": "resnet18",
}
SMALL_RESNET = {"family-arguments": "first_channels = 4"}


@pytest.mark.parametrize(
    ("method", "steps", "taken"), [("model-search", 5, 5), ("model-search", -1, 100), ("heterofl", 5, 5)]
)
def test_the_log_says_what_distillation_costs(method, steps, taken, tmp_path, caplog):
    """By hand, of 100-200-200-10: students forward and backward, without gradients of inputs; teachers forward."""
    layers = (100 * 200, 200 * 200, 200 * 10)
    forward = 2 * sum(layers)
    backward = 2 * forward - 2 * layers[0]
    family = make_family({"name": "mlp", "input_shape": [1, 10, 10], "classes": 10})
    made = setup(tmp_path, family, devices_per_round=3)
    kind = METHODS[method]
    with caplog.at_level("INFO"):
        kind(
            replace(made, shared={"distillation": Distillation(steps=steps, batch_size=4)}), kind.params_type()
        ).start()
    [told] = [record.getMessage() for record in caplog.records if "distills" in record.getMessage()]
    assert f"3 sub-models, {taken} steps of 4 inputs for each, at most" in told
    [flops] = re.findall(r"at most ([\d.e+]+) FLOPs", told)
    assert float(flops) == pytest.approx(3 * taken * 4 * (forward + backward + forward), rel=0.05)


def test_without_distillation_there_is_no_word_on_its_cost(tmp_path, caplog):
    family = make_family({"name": "mlp", "input_shape": [1, 10, 10], "classes": 10})
    made = replace(setup(tmp_path, family), shared={"distillation": Distillation(steps=0)})
    with caplog.at_level("INFO"):
        ModelSearch(made, ModelSearchParams()).start()
    assert "distill" not in caplog.text


def add(mean, family, arch, value, weight=1):
    """One device's update: `value` everywhere."""
    layout = Layout.of(family.tensors(arch))
    weights = {name: torch.full(spec.shape, value) for name, spec in family.tensors(arch).items()}
    total = WeightedSum.zeros(layout)
    total.add(flatten(weights, layout), weight, None, ())
    mean.add(family.place(arch), layout, total)


def test_elements_of_kernels_and_widths_are_averaged_over_their_owners():
    """Device A: 2 channels, 3x3, answers 1. Device B: 1 channel, 5x5, answers 4. What is left was -7."""
    family = Cnn3(input_shape=(1, 8, 8), kernel=5, norm="static")
    before = {name: torch.full(spec.shape, -7.0) for name, spec in family.tensors(family.full()).items()}
    mean = CoordinateMean(before)
    add(mean, family, family.architecture({"conv1": 2}, kernel=3), 1.0)
    add(mean, family, family.architecture({"conv1": 1}), 4.0)
    first = mean.mean(before)["block1.conv.weight"]
    # Channel 0: both own the centre, (1 + 4) / 2 = 2.5; B alone owns the ring: 4.
    assert first[0, 0].tolist() == [[4.0] * 5] + [[4.0, 2.5, 2.5, 2.5, 4.0]] * 3 + [[4.0] * 5]
    # Channel 1: A alone owns the centre, nobody the ring.
    assert first[1, 0].tolist() == [[-7.0] * 5] + [[-7.0, 1.0, 1.0, 1.0, -7.0]] * 3 + [[-7.0] * 5]
    assert bool((first[2:] == -7.0).all())


def test_elements_of_missing_layers_are_averaged_over_those_that_have_them():
    """A has both blocks of stage 1 and answers 1, B has not the second and answers 5; by 1 and by 3 examples."""
    family = ResNet18(input_shape=(1, 8, 8), first_channels=4, norm="static")
    before = {name: torch.full(spec.shape, -7.0) for name, spec in family.tensors(family.full()).items()}
    mean = CoordinateMean(before)
    add(mean, family, family.architecture(without=["stage4_1"]), 1.0, weight=1)
    add(mean, family, family.architecture(without=["stage1_1", "stage4_1"]), 5.0, weight=3)
    after = mean.mean(before)
    assert set(after["stage1_0.conv1.weight"].flatten().tolist()) == {4.0}  # (1 + 3 * 5) / 4
    assert set(after["stage1_1.conv1.weight"].flatten().tolist()) == {1.0}
    assert set(after["stage4_1.conv1.weight"].flatten().tolist()) == {-7.0}


def search(folder, kind=ModelSearch, **changes):
    family = ResNet18(input_shape=(1, 8, 8), first_channels=4, norm="static", scaler=True)
    params = ModelSearchParams(**{"shares": (0.0, 0.5, 1.0), "searcher": "exact", "masked_loss": True} | changes)
    return kind(setup(folder, family), params)


def test_the_mean_is_over_devices_or_over_examples(tmp_path):
    def merge(kind=ModelSearch, **changes):
        strategy = search(tmp_path, kind, **changes)
        smallest = strategy.space.smallest()
        return strategy.client_step(Order(0, smallest)).returned(strategy.family, smallest)["weights"].merge

    assert merge() == Merge(weighting="uniform", present_classes=True)
    assert merge(ByExamples) == Merge(weighting="examples", present_classes=True)
    assert merge(masked_loss=False) == Merge(weighting="uniform", present_classes=False)


def test_only_heterofl_and_those_that_compare_as_it_does_divide_by_the_width(tmp_path):
    kin = [name for name, kind in METHODS.items() if issubclass(kind, StaticNormMethod)]
    families = {
        method: started(small_config(tmp_path, strategy=method, **{"run-name": method}))[0].method.family
        for method in kin
    }
    assert {method: family.scaler for method, family in families.items()} == {
        "heterofl": True,
        "fedrolex": True,
        "federated-dropout": True,
        "fjord": False,
        "anycostfl": False,
        "model-search": False,
        "one-model": False,
        "wildflower": False,
    }
    assert families.pop("model-search").norm == "batch"
    assert {family.norm for family in families.values()} == {"static"}
    without = {"strategy": "heterofl", "family-arguments": "scaler = false", "run-name": "without"}
    assert not started(small_config(tmp_path, **without))[0].method.family.scaler


def priced(strategy, arch):
    return cost(strategy.family, arch, batch_size=2, optimizer=strategy.settings.optimizer)


@pytest.mark.parametrize("searcher", ["exact", "pool"])
def test_what_is_assigned_fits_the_budget(searcher, tmp_path):
    strategy = search(tmp_path, searcher=searcher)
    small, large = priced(strategy, strategy.space.smallest()), priced(strategy, strategy.space.largest())
    sizes = set()
    for device, part in enumerate((0.2, 0.5, 0.9, 2.0)):
        memory = small.peak_training_memory_bytes + part * large.peak_training_memory_bytes
        payload_bytes = int(small.payload_bytes + part * large.payload_bytes)
        budget = Budget(int(memory), payload_bytes, payload_bytes)
        arch = strategy.assign(device, budget)
        found = priced(strategy, arch)
        assert found.peak_training_memory_bytes <= budget.memory_bytes
        assert found.payload_bytes <= budget.both_ways_bytes
        sizes.add(found.parameters)
    assert large.parameters * 0.98 <= max(sizes)
    assert len(sizes) > (1 if searcher == "pool" else 3)


def test_a_device_below_the_smallest_is_left_out_or_gets_it(tmp_path):
    strategy = search(tmp_path)
    nothing = Budget(10, 10, 10)
    assert strategy.assign(0, nothing) is None
    strategy.below_smallest = "smallest"
    assert strategy.assign(0, nothing) == strategy.space.smallest()


def test_a_space_that_breaks_the_shape_is_refused(tmp_path):
    config = small_config(tmp_path, **{"strategy": "model-search", "model-search.shares": "0, 1"})
    strategy = started(config)[0].method  # nothing of lenet5 may be left out: the share 0 stands for nothing there
    assert strategy.space.size == 1
    with pytest.raises(
        ValueError, match=r"model-search.shares = '0': every share lies in \[0, 1\], and one is above 0"
    ):
        small_config(tmp_path, **{"strategy": "model-search", "model-search.shares": "0"})


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ("conv1 = [0, 1]", "share 0 of conv1: what follows needs this layer; layers that may be left out: none"),
        ("conv4 = [1]", "lenet5 has no choice named 'conv4'; did you mean 'conv"),
        ("conv1 = [0.1, 0.15]", "shares 0.1 and 0.15 of conv1 both keep 1 of 6 channels: leave one out"),
        ("conv1 = [1.5]", r"shares of conv1 lie in \[0, 1\], not 1.5"),
        ("conv1 = []", "shares of conv1 must ascend and be at least one"),
        ("conv1 = [nan]", r"shares of conv1 lie in \[0, 1\], not nan"),
    ],
)
def test_a_share_that_a_layer_cannot_have_stops_the_run(shares, words, tmp_path):
    config = small_config(tmp_path, **{"strategy": "model-search", "model-search.layer-shares": shares})
    with pytest.raises(ValueError, match=f"model-search.layer-shares = '.*': space: .*{words}"):
        started(config)


def test_a_space_in_which_nothing_is_left_stops_the_run(tmp_path):
    config = small_config(tmp_path, **SEARCH | {"model-search.layer-shares": "'*' = [0]"})
    with pytest.raises(ValueError, match=r"share 0 of stage1.stream: what follows needs this layer; .* stage1_1, "):
        started(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("conv1 = 0.5", "conv1 is no list of numbers, but 0.5"),
        ("conv1 = ['half']", r"conv1 is no list of numbers, but \['half'\]"),
        ("conv1 = [true]", r"conv1 is no list of numbers, but \[True\]"),
        ("conv1 = [1], conv1 = [0.5]", "a layer is named twice; give each its shares once"),
        ("stage1.stream = [1], stage1.stream = [1]", "a layer is named twice; give each its shares once"),
        ("conv1 [1]", "Expected '=' after a key"),
        ("stage*_1 = [1]", "Expected '=' after a key"),
    ],
)
def test_layer_shares_that_cannot_be_read_are_refused(text, words, tmp_path):
    with pytest.raises(ConfigError, match=f"model-search.layer-shares = .*must be like .*{words}"):
        small_config(tmp_path, **{"strategy": "model-search", "model-search.layer-shares": text})


def test_shares_of_single_layers():
    text = "stem = [1], stage1.stream = [0.5, 1], 'stage3_*' = [1, 0], \"conv1.kernel\" = [3]"
    assert layer_shares(text) == {
        "stem": (1.0,),
        "stage1.stream": (0.5, 1.0),
        "stage3_*": (0.0, 1.0),
        "conv1.kernel": (3.0,),
    }
    assert layer_shares("") == {}


def test_the_space_is_the_configurations(tmp_path):
    keys = {"model-search.layer-shares": "'stage2_*' = [1], stage3_1 = [0.25]", "model-search.min-blocks": 2}
    strategy = started(small_config(tmp_path, **SEARCH | SMALL_RESNET | keys))[0].method
    own = {choice.name: choice.shares for choice in strategy.space.choices}
    assert own["stage2_1"] == own["stage2_0.inner1"] == (1.0,)
    assert own["stage3_1"] == (0.25,)
    assert own["stage4_1"] == (0.0, 0.25, 0.5, 1.0)
    # Two blocks per stage, and both stay.
    widths = dict(zip(strategy.family.groups, strategy.space.smallest().widths, strict=True))
    assert all(widths.values())
    with pytest.raises(ValueError, match=r"model-search.min-blocks = 3: space: 3 blocks .* stage1 of resnet18 has 2"):
        started(small_config(tmp_path, **SEARCH | SMALL_RESNET | {"model-search.min-blocks": 3}))


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "relu6"),
        ({"family-arguments": "activation = 'relu'"}, "relu"),
        ({"family-arguments": "activation = 'relu6'"}, "relu6"),
        ({"model-search.shares": "0.5, 1"}, "relu"),  # nothing can be left out
        ({"model-search.shares": "0.5, 1", "model-search.layer-shares": "stage2_1 = [0, 1]"}, "relu6"),
        ({"strategy": "heterofl"}, "relu"),
    ],
)
def test_what_passes_where_layers_may_be_missing_is_bounded_unless_the_user_says_no(keys, activation, tmp_path):
    strategy = started(small_config(tmp_path, **SEARCH | keys))[0].method
    assert strategy.family.activation == activation


def test_running_statistics_are_tracked_and_averaged_where_the_user_says_so(tmp_path, monkeypatch):
    """Then there is nothing to ask devices for before the model is scored."""
    arguments = {"family-arguments": "first_channels = 4, norm = 'batch'"}
    engine, scorer = started(small_config(tmp_path, **SEARCH | arguments | {"evaluate-every": 1}))
    monkeypatch.setattr(engine.evaluation, "_statistics", None)  # what asks devices for statistics
    assert set(engine.method.weights["stem.norm.running_mean"].tolist()) == {0.0}
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert result.record["score"] is not None
    assert set(engine.method.weights["stem.norm.running_mean"].tolist()) != {0.0}
    scored = engine.method.models([engine.method.space.largest()])
    [model] = scored.values()
    assert torch.equal(model.weights["stem.norm.running_mean"], engine.method.weights["stem.norm.running_mean"])


@pytest.mark.thorough
def test_of_one_architecture_it_is_fedavg_with_the_running_statistics_of_a_module(tmp_path):
    """All devices train the whole module on as many examples; its statistics are averaged like its weights."""
    common = {"family": "own_traced:Residual", "below-smallest": "smallest", "rounds": 2}
    search = {"strategy": "model-search", "model-search.shares": "1", "distillation.steps": 0}
    average = {"strategy": "fedavg", "fedavg.use": "all-large"}
    found = []
    for number, keys in enumerate((search, average)):
        (folder := tmp_path / str(number)).mkdir()
        engine, scorer = started(small_config(folder, **common | keys))
        grid = simulated_grid()
        for round in (1, 2):
            engine.run_round(grid, round, scorer)
        found.append(engine.method.weights)
    assert set(found[0]["bn1.running_mean"].tolist()) != {0.0}
    worst = max((found[0][n] - value).abs().max() for n, value in found[1].items())
    assert (set(found[0]), float(worst)) == (set(found[1]), pytest.approx(0, abs=1e-6))


def test_families_without_an_activation_to_choose_are_left_alone(tmp_path):
    strategy = started(small_config(tmp_path, **SEARCH | {"family": "cnn3"}))[0].method
    assert "activation" not in strategy.family.spec()


def test_devices_without_a_link_are_skipped_and_counted(tmp_path):
    config = small_config(tmp_path, **SEARCH | SMALL_RESNET | {"budget.transfer-seconds": 10.0, "devices-per-round": 6})
    (tmp_path / "none.csv").write_text("seconds,mbit_per_s\n0,0\n1,0\n")
    fleet = tmp_path / "six.toml"
    fleet.write_text(fleet.read_text().replace('link = "20 Mbit/s"', 'down_trace = "none.csv"\nup_trace = "none.csv"'))
    engine, scorer = started(config)
    result = engine.run_round(simulated_grid(), 1, scorer)
    outcomes = {d["tier"]: d["outcome"] for d in result.devices}
    assert outcomes["half"].startswith("skipped: ")
    assert outcomes["whole"] == "trained"
    assert result.record["devices_replied"] == 4
    assert result.record["devices_below_smallest"] == 2


def test_a_device_whose_memory_shrinks_after_its_report_gets_less_though_its_next_report_is_as_high(
    tmp_path, monkeypatch
):
    hardware = {"fleet": "", "devices": 1, "devices-per-round": 1, "batch-size": 2, "budget.memory-fraction": 1.0}
    hardware["model-search.tolerance"] = 0.0
    engine, scorer = started(small_config(tmp_path, **SEARCH | SMALL_RESNET | hardware))
    strategy = engine.method
    large = strategy.cost(strategy.space.largest()).peak_training_memory_bytes
    high, low = 3 * large, large - 1
    free, reported = [high], []

    def report():
        reported.append(free[0])
        return DeviceReport("board", memory_total_bytes=10 * large, memory_available_bytes=free[0])

    monkeypatch.setattr(prepared, "probe_machine", report)
    for module in (client_module, training_message):
        monkeypatch.setattr(module, "device_report", lambda config, traffic_bytes=0, left_bytes=0: report())
    grid = connected_grid(1, tmp_path)
    send = grid.push_messages

    def memory_is_low_while_training(messages):
        messages = list(messages)
        free[0] = low if any(m.metadata.message_type == "train" for m in messages) else high
        return send(messages)

    grid.push_messages = memory_is_low_while_training
    [first] = engine.run_round(grid, 1, scorer).devices
    assert first["outcome"].startswith(f"refused: training needs about {large} bytes, this device has free {low}")
    assert first["predicted_memory_bytes"] <= first["budget"]["memory_bytes"]
    reported.clear()
    [second] = engine.run_round(grid, 2, scorer).devices
    assert reported[0] == high  # what the second budget was made of
    assert second["predicted_memory_bytes"] <= second["budget"]["memory_bytes"] <= low


def test_the_whole_method_is_the_default(tmp_path, caplog):
    """Line 27 of the paper's algorithm: 100 steps of 64 inputs for as many sub-models as a round has devices."""
    keys = {name: value for name, value in SEARCH.items() if name != "distillation.steps"} | SMALL_RESNET
    with caplog.at_level("INFO", "flwr"):
        strategy = started(small_config(tmp_path, **keys))[0].method
        strategy.start()
    assert (strategy.distillation.steps, strategy.distillation.batch_size) == (100, 64)
    assert "4 sub-models, 100 steps of 64 inputs for each, at most " in caplog.text
    other = started(small_config(tmp_path, strategy="heterofl"))[0].method
    assert other.distillation.steps == 0


@pytest.mark.parametrize("masked", [True, False])
def test_the_loss_is_masked_or_plain(masked, tmp_path):
    strategy = search(tmp_path, masked_loss=masked)
    local = strategy.client_step(Order(0, strategy.space.smallest()))
    assert local == (MaskedTraining if masked else Training)(weighting="uniform")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy_name", ["model-search", "fedavg", "heterofl"])
def test_without_tiers_the_global_model_alone_is_scored(strategy_name, tmp_path):
    keys = SEARCH | SMALL_RESNET | {"strategy": strategy_name, "evaluate-every": 1}
    if strategy_name == "fedavg":  # which reads nothing of distillation
        del keys["distillation.steps"]
    training_bytes, statistics_bytes, scored = {}, {}, {}
    for tiers in (True, False):
        engine, scorer = started(small_config(tmp_path, **keys, **{"evaluate-tiers": tiers}))
        count = []

        def counted(model, scorer=scorer, count=count):
            count.append(model)
            return scorer(model)

        record = engine.run_round(simulated_grid(), 1, counted).record
        assert record["score"] is not None
        assert bool(record["score_by_tier"]) == tiers
        training_bytes[tiers], statistics_bytes[tiers] = record["training_bytes_down"], record["statistics_bytes_down"]
        scored[tiers] = len(count)
    assert scored[False] == 1
    assert training_bytes[True] == training_bytes[False]
    if strategy_name != "fedavg":
        assert scored[True] > 1
        assert statistics_bytes[True] > statistics_bytes[False]


def test_a_space_without_a_choice_is_told(tmp_path, caplog):
    for shares, told in (("1", True), ("0.5, 1", False)):
        config = small_config(tmp_path, **{**SEARCH, "family": "lenet5", "model-search.shares": shares})
        strategy = started(config)[0].method
        caplog.clear()
        with caplog.at_level("WARNING", "flwr"):
            strategy.start()
        assert ("There is one architecture to choose from" in caplog.text) == told


@pytest.mark.parametrize(
    ("shares", "layers", "family", "norm", "told"),
    [
        ((0.5, 1.0), "", "resnet18", "batch", True),
        ((1.0,), "'stage1.stream' = [0.5, 1]", "resnet18", "batch", True),
        ((0.5, 1.0), "", "resnet18", "static", False),
        ((0.0, 1.0), "", "resnet18", "batch", False),
        ((0.5, 1.0), "", "vit-tiny", "batch", False),
    ],
)
def test_averaged_statistics_of_unlike_widths_are_told(shares, layers, family, norm, told, tmp_path, caplog):
    made = ResNet18(input_shape=(1, 8, 8), first_channels=4, norm=norm)
    if family != "resnet18":
        made = make_family({"name": family, "input_shape": [1, 8, 8], "classes": 10})
    params = ModelSearchParams(shares=shares, layer_shares=layers, norm=norm)
    ModelSearch(setup(tmp_path, made), params).start()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("set model-search.norm = 'static'" in warning for warning in warnings) == told


def test_effective_owners_are_the_harmonic_mean_over_the_coordinates_that_anybody_trained(tmp_path):
    """Three devices have the s coordinates of the smallest, and one of them all n: n / (s / 3 + (n - s) / 1).

    That device has trained the smallest beside the whole, which makes it no second owner.
    """
    strategy = search(tmp_path)
    smallest, whole = strategy.space.smallest(), strategy.space.largest()
    orders = [Order(0, smallest), Order(1, smallest), Order(2, whole), Order(2, smallest)]
    trained = [Trained(order, "a tier", 10, None, {}) for order in orders]
    s, n = (
        sum(v.numel() for v in strategy.family.place(a).gather(strategy.weights).values()) for a in (smallest, whole)
    )
    figures = strategy.finish_round(trained)
    assert figures["effective_owners"] == pytest.approx(n / (s / 3 + (n - s)))
    assert figures["untouched_share"] == 0
    assert strategy.finish_round(trained[:2])["untouched_share"] == pytest.approx(1 - s / n)
    assert strategy.finish_round([])["effective_owners"] is None


def test_owners_are_counted_by_what_devices_return(tmp_path):
    engine, scorer = started(small_config(tmp_path, **SEARCH | SMALL_RESNET, **{"devices-per-round": 6}))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    assert record["devices_replied"] == 6
    assert 1 <= record["metrics"]["effective_owners"] <= 6
    assert 0 <= record["metrics"]["untouched_share"] < 1


def test_an_exact_search_without_a_chain_names_the_key(tmp_path):
    tied = make_family({"name": "own_traced:Tied", "input_shape": [6], "classes": 7, "tokens": True})
    method = ModelSearch(setup(tmp_path, tied), ModelSearchParams(shares=(0.5, 1.0), searcher="exact"))
    with pytest.raises(ValueError, match=r"^model-search.searcher = 'exact': .* add up .*; 'pool' needs no chain"):
        _ = method.searcher


def test_the_pool_has_no_other_criterion(tmp_path):
    with pytest.raises(ConfigError, match="criterion = 'flops' needs searcher = 'exact'"):
        small_config(tmp_path, **SEARCH | {"model-search.searcher": "pool", "model-search.criterion": "flops"})
