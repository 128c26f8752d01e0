"""Networks of a user's own are tried before round 1."""

from unittest import mock

import pytest
import torch

from tests.small_run import small_config
from wildflower.models.family import make_family
from wildflower.server_app.app import build
from wildflower.server_app.config import ConfigError
from wildflower.server_app.trial import Batches, try_networks
from wildflower.tasks.task import TaskSpec, load_task

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")


@pytest.fixture(scope="module")
def digits():
    return load_task(TaskSpec(name="digits", devices=6))


def tried(name, task, examples=(24, 24, 21), batch_size=20, micro=0, module="own_trials", **more):
    spec = {"name": f"{module}:{name}", "input_shape": list(task.input_shape), "classes": task.classes, "levels": [{}]}
    family = make_family(spec | more)
    return try_networks(family, task, Batches(batch_size, micro, list(examples)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "TupleInEvaluation",
            r"a batch of 2 in evaluation mode with a tuple of 2: it must be one tensor of \(batch, 10\)",
        ),
        ("ListInEvaluation", "in evaluation mode with a list of 1"),
        ("TupleInTraining", "a batch of 2 in training mode with a tuple of 2"),
        ("Named", "in evaluation mode with a dict with 'logits'"),
        ("Squeezed", r"a batch of 1 in evaluation mode with a tensor of \(10,\): .* squeeze\(\) without a dimension"),
        ("Folded", r"a batch of 2 in evaluation mode with a tensor of \(1, 10\): .* here \(2, 10\)"),
        ("Classes", r"in evaluation mode with a tensor of \(2,\)"),
        ("Whole", r"in evaluation mode with torch\.int32: it must be logits"),
        ("OneMore", r"with a tensor of \(2, 10, 1\)"),
        ("Even", "fails on a batch of 3 in evaluation mode: RuntimeError: an even batch"),
        ("OnlyTraining", "fails on a batch of 2 in evaluation mode: RuntimeError: not in evaluation mode"),
        ("NoNumbers", r"a batch of 1 in evaluation mode with values that are no numbers \(NaN\)"),
        ("ChangingInEvaluation", r"^ChangingInEvaluation changes its input in place"),
        ("KeepingABatch", "answers an input in evaluation mode by what it was given before"),
        ("CountingPasses", "answers an input in evaluation mode by what it was given before"),
        ("NumbersWithoutASeed", "each time that it is made with the same weights: .* without a seed"),
        ("FlagsFromZeros", "training changes the buffer used, which has no values but 0 and 1"),
        ("Detached", "has nothing to train: in training mode its answer does not depend on any parameter"),
    ],
)
def test_what_would_end_a_run_later_is_said_before_round_1(digits, name, words):
    with pytest.raises(ValueError, match=words):
        tried(name, digits, examples=(24, 23, 22))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WithAView", r"first shares memory with stem\.weight"),
        ("WithSharedMemory", r"raw shares memory with scale"),
        ("Unsteady", "order has other values each time the network is made"),
        ("FromFirstWeights", r"first\[0\] is made from first weights .* register_buffer"),
        ("OrderOfFirstWeights", "order is made from first weights"),
        ("Codebook", "training changes the buffer code, which has length 1 along dimension 1"),
        ("ChangingMask", "training changes the buffer mask, which has no values but 0 and 1"),
        ("SparseInForward", "the gradient of words is sparse"),
    ],
)
def test_what_devices_would_have_otherwise_is_named(digits, name, words):
    with pytest.raises(ValueError, match=words):
        tried(name, digits, module="own_constants")


@pytest.mark.parametrize("name", ["Normalized", "RawCodebook", "Twice", "LikeAWeight", "DrawnByTorch", "DrawnByOthers"])
def test_what_goes_well_is_not_refused_and_draws_nothing(digits, name):
    torch.manual_seed(3)
    assert tried(name, digits, module="own_constants") == []
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AlwaysDropout", "answers the same input differently each time: F.dropout needs training=self.training"),
        ("OverTheBatch", "depends on the other inputs of its batch: .* batch_first=True"),
        ("EarlierOnes", "depends on the other inputs of its batch"),
    ],
)
def test_answers_that_depend_on_chance_or_on_the_batch_are_warned_of(digits, name, words):
    [warning] = tried(name, digits)
    assert words.split(".*")[0].strip() in warning


@pytest.mark.parametrize(("name", "told"), [("Softmax", 1), ("Sigmoid", 1), ("LogSoftmax", 0), ("Zeros", 0)])
def test_probabilities_in_place_of_logits_are_warned_of(digits, name, told):
    warnings = tried(name, digits)
    assert len(warnings) == told
    assert all("lie between 0 and 1, as behind a softmax or a sigmoid" in warning for warning in warnings)


@pytest.mark.parametrize(("name", "what"), [("FirstBatchSetsWeights", "ready"), ("WarmUp", "steps")])
def test_what_training_changes_and_does_not_travel_is_warned_of(digits, name, what):
    [warning] = tried(name, digits)
    assert f"Training changes something of its network, such as {what}, that does not travel" in warning
    assert tried("HarmlessCount", digits) == []


def test_every_level_is_tried(digits):
    with pytest.raises(ValueError, match=r"its network {'widths': \[1\]} answers a batch of 2 in evaluation mode"):
        tried("OfALevel", digits, levels=[{"wrong": True}, {}])
    assert tried("OfALevel", digits, levels=[{}, {}]) == []


@pytest.mark.parametrize("module", ["own_trials", None])
def test_batch_norm_and_a_single_example(digits, module):
    """With a module of one's own and with a family of the project's, whose last map is 1x1."""

    def found(examples, **more):
        if module:
            return tried("Normed", digits, examples, **more)
        family = make_family({"name": "resnet18", "input_shape": [1, 8, 8], "first_channels": 4, "depth": 1})
        return try_networks(family, digits, Batches(more.get("batch_size", 20), more.get("micro", 0), examples))

    assert found([24, 41, 20]) == []  # of 41, one is left out in every pass
    [warning] = found([24, 1, 1])
    assert warning.startswith("2 of 3 devices have one training example, and its network does not train on a single")
    with pytest.raises(ValueError, match="every device has one training example"):
        found([1, 1])
    with pytest.raises(ValueError, match=r"^batch-size = 1: its network does not train on a single .*Expected more"):
        found([24, 24], batch_size=1)
    assert warning.count("a single example") == 1
    assert "(ValueError: Expected more than 1 value per channel" in warning
    with pytest.raises(ValueError, match=r"^micro-batch-size = 1: "):
        found([24, 24], micro=1)


def test_a_module_without_batch_norm_trains_on_single_examples(digits):
    assert tried("Even", digits, examples=[1, 4], batch_size=2) == []
    assert tried("Plain", digits, examples=[1, 1], batch_size=1, module="own_constants") == []


def test_the_log_says_what_was_tried(digits, caplog):
    caplog.set_level("INFO", logger="flwr")
    tried("Plain", digits, examples=[24, 27], module="own_constants")
    assert caplog.messages == [
        "Tried 1 network of the family: in evaluation mode on batches of 1, 2, 4, 7, in training mode on batches of 2, "
        "4, 7"
    ]


def test_last_batches():
    batches = Batches(20, 0, [24, 41, 20, 1, 7, 64, 1])
    assert (batches.rests, batches.single, batches.left_over) == ([4, 7, 20], 2, 1)
    assert Batches(20, 8, [24, 41, 20]).rests == [4, 8]
    assert Batches(1, 0, [24, 1]).left_over == 0


def test_devices_alone_have_the_examples(digits):
    """Made inputs take their place: of a shape, a type and a kind of labels all is known."""
    task = mock.Mock(wraps=digits)
    for name in ("classes", "input_shape", "label_kind", "metric", "vocabulary"):
        setattr(task, name, getattr(digits, name))
    task.train = task.test = []
    assert tried("Squeezed", task, arguments={"mode": "none"}) == []
    with pytest.raises(ValueError, match=r"a batch of 1 in evaluation mode with a tensor of \(10,\)"):
        tried("Squeezed", task)


def test_a_run_does_not_start(tmp_path):
    with pytest.raises(
        ConfigError, match=r"family = 'own_trials:TupleInEvaluation'.*: its network answers .* with a tuple of 2"
    ):
        build(small_config(tmp_path, family="own_trials:TupleInEvaluation", family_arguments="levels = [{}]"))
    with pytest.raises(ConfigError, match=r"batch-size = 1: its network .* does not train on a single example"):
        build(small_config(tmp_path, family="own_trials:Normed", **{"batch-size": 1}))
