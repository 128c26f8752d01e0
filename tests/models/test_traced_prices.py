import copy
import math

import numpy as np
import pytest
import torch

from tests.encoders import encoder
from tests.models.test_cost import allocated_peak_bytes
from wildflower.models import max_pool
from wildflower.models.cost import OPTIMIZERS, backward_copies, cost, forward_copies
from wildflower.models.family import make_family
from wildflower.models.trace import follow, memory_inside, recurrent_copies, recurrent_workspace
from wildflower.models.traced.price import Factors

torch.set_num_threads(1)
aten = torch.ops.aten

DESCRIBED = [
    {"name": "lenet5", "input_shape": [1, 12, 12]},
    {"name": "cnn3", "norm": "static", "scaler": True},
    {"name": "resnet18", "input_shape": [3, 8, 8], "first_channels": 8},
    {"name": "bert", "input_shape": [20], "classes": 30, "hidden": 64, "depth": 2, "heads": 4, "mlp": 128},
]


@pytest.mark.thorough
@pytest.mark.parametrize("spec", DESCRIBED, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "sgd-momentum, accumulated"])
def test_a_traced_step_costs_what_the_described_layers_do(spec, optimizer, monkeypatch):
    # Described layers are priced with PyTorch's pool; by slices a large pool keeps less.
    monkeypatch.setattr(max_pool, "LEAST_BY_SLICES", math.inf)
    family = make_family(spec)
    arch = family.width(0.5)
    known = cost(family, arch, batch_size=6, optimizer=optimizer)
    shape, dtype, accumulates = family.input_shape, family.input_dtype, OPTIMIZERS[optimizer].accumulates
    step = follow(lambda: family.build(arch), 6, shape, dtype, family.classes, accumulates=accumulates)
    traced = step.cost(6, optimizer)
    assert (traced.parameters, traced.payload_bytes) == (known.parameters, known.payload_bytes)
    assert traced.training_flops == known.training_flops
    assert traced.peak_training_memory_bytes == pytest.approx(known.peak_training_memory_bytes, rel=0.002)
    assert step.convolutions == family.convolutions(arch)


class Recurrent(torch.nn.Module):
    """Five steps of three values, read by a recurrent layer of four units; two classes."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.head = getattr(torch.nn, kind)(3, 4, batch_first=True), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize(("kind", "gates", "unneeded"), [("LSTM", 4, 0), ("GRU", 3, 1), ("RNN", 1, 1)])
def test_recurrent_layers_by_hand(kind, gates, unneeded):
    """Every weight is used in each of five steps; oneDNN's LSTM also finds unneeded gradients of inputs and state."""
    step = follow(lambda: Recurrent(kind), 6, (5, 3), torch.float32, 2)
    of_inputs, of_states = 2 * gates * 4 * 3, 2 * gates * 4 * 4
    by_hand = (3 - unneeded) * 5 * of_inputs + (3 * 5 - unneeded) * of_states + 3 * 2 * 4 * 2
    assert step.cost(6, "sgd").training_flops == by_hand


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's own workspace is asked")
def test_an_lstm_holds_about_as_much_as_onednns_workspace():
    steps, examples, inputs, hidden = 8, 64, 48, 48
    layer, x = torch.nn.LSTM(inputs, hidden), torch.randn(steps, examples, inputs)
    state = torch.zeros(1, examples, hidden)
    weights = [parameter.detach() for parameter in layer.parameters()]
    options = (False, [], 2, hidden, 1, True, False, False, True)
    states, _, _, workspace = torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, *options)
    assert recurrent_workspace(states) + recurrent_copies(x.shape, states.shape) == pytest.approx(
        workspace.nbytes, rel=0.1
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_encoder_holds_what_pytorch_allocates(kind, optimizer):
    family = make_family(encoder(kind, input_shape=[12], vocabulary=200, classes=8, hidden=48, mlp=96))
    arch = family.width(0.5)
    predicted = cost(family, arch, batch_size=8, optimizer=optimizer).peak_training_memory_bytes
    allocated = allocated_peak_bytes(family, arch, 8, optimizer)
    assert predicted == pytest.approx(allocated, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_may_convert_its_own_parameters(dtype):
    """What is converted takes the place of what was there; what needs no conversion stays the same tensor."""
    step = follow(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3)).to(dtype), 2, (4,), dtype, 3)
    assert (step.parameters, step.state_bytes) == (15, 15 * dtype.itemsize)


def test_a_parameter_that_two_layers_share_is_still_one_when_it_is_converted():
    """4 x 4 weights once, and two biases of 4."""

    def module():
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        second.weight = first.weight
        return torch.nn.Sequential(first, second).to(torch.float64)

    assert follow(module, 2, (4,), torch.float64, 4).parameters == 24


@pytest.mark.filterwarnings("error")
def test_a_module_may_copy_its_layers():
    """As `nn.TransformerEncoder` does. A layer that stands twice in what is copied is one in the copy too."""

    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 2)
            shared = torch.nn.Linear(8, 8)
            self.twice = copy.deepcopy(torch.nn.ModuleList([shared, shared]))
            self.norm = copy.deepcopy(torch.nn.BatchNorm1d(8))
            self.out = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x).mean(1)
            return self.out(self.norm(self.twice[1](self.twice[0](x))))

    # A layer: 4 x (8 x 8 + 8) of attention, 16 x 8 + 16 and 8 x 16 + 8, two norms of 16.
    layer = 288 + 144 + 136 + 32
    assert follow(Copies, 4, (5, 8), torch.float32, 3).parameters == 2 * layer + 72 + 16 + 27


def test_a_network_may_answer_for_every_token():
    family = make_family(encoder(depth=1, input_shape=[12], classes=5, labels="tokens"))
    assert cost(family, family.full(), batch_size=2, optimizer="sgd").parameters > 40 * 16
    with pytest.raises(ValueError, match=r"returns \(2, 5, 12\) .* must return one tensor of \(batch, 12\)"):
        follow(lambda: family.build(family.full()), 2, (12,), torch.int64, 12)


def test_one_head_is_priced_as_a_step_of_its_own():
    """Where a side is 1, PyTorch makes views of what it copies otherwise, and more stays in memory."""
    family = make_family({"name": "own_traced:Scores", "input_shape": [1, 8, 8], "classes": 7})
    heads = [number for number, full in enumerate(family.groups.values()) if full == 4]
    assert heads
    for arch in (family.width(0.25), family.smallest()):
        assert set(family.ones(arch.widths)) & set(heads)
        true = follow(lambda arch=arch: family.build(arch), 64, (1, 8, 8), torch.float32, 7).peak_bytes
        assert family.step(arch, 64, accumulates=False).peak_bytes == pytest.approx(true, rel=0.005)


REAL, COMPLEX = torch.rand(64, 8, 16, 12), torch.rand(64, 8, 16, 12, dtype=torch.complex64)
WEIGHT = torch.rand(32, 8, 1, 1)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten._fft_r2c.default, (REAL, [2, 3], 0, True)),
        (aten._fft_r2c.default, (REAL, [1], 0, True)),
        (aten._fft_r2c.default, (REAL[:, :1].expand(-1, 8, -1, -1), [2, 3], 0, True)),
        (aten._fft_c2c.default, (COMPLEX, [3], 0, True)),
        (aten._fft_c2c.default, (COMPLEX, [2], 0, True)),
        (aten._fft_c2c.default, (COMPLEX.transpose(2, 3), [2], 0, True)),
        (aten._fft_c2r.default, (COMPLEX, [3], 0, 22)),
        (aten._fft_c2r.default, (COMPLEX, [1], 0, 14)),
        (aten._fft_c2r.default, (COMPLEX, [2, 3], 0, 22)),
        (aten.bmm.default, (COMPLEX[:, 0], COMPLEX[:, 1].mT)),
        (aten.bmm.default, (COMPLEX[:, 0].contiguous(), COMPLEX[:, 1].contiguous().conj().mT)),
    ],
)
def test_an_operator_holds_what_pytorch_allocates(operator, arguments):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = operator(*arguments)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    inside = memory_inside(operator, arguments, result)
    counted, tensors = inside or (lambda: result.nbytes, ())
    assert counted(*[tensor.shape for tensor in tensors]) == pytest.approx(live.max(), rel=0.01)


def test_a_convolution_makes_gradients_dense_first():
    """Of every other entry of larger memory, as of a real part: as many bytes more as the gradient has."""
    gradient = torch.rand(64, 32, 16, 12, dtype=torch.complex64).real
    held = []
    for each in (gradient, gradient.contiguous()):
        arguments = (each, REAL, WEIGHT, [32], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
        counted, tensors = memory_inside(aten.convolution_backward.default, arguments, None)
        held.append(counted(*[tensor.shape for tensor in tensors]))
    assert held[0] - held[1] == 4 * 64 * 32 * 16 * 12


def test_a_number_is_read_as_a_product_of_widths():
    """Also where primes are the mean of two others, or where a factor is larger than the smallest of them."""
    family = make_family({"name": "own_traced:Dense", "input_shape": [1, 8, 8], "classes": 7})
    factors = Factors(family.read)
    first = factors.primes[0]
    widths = [3 + number for number in range(len(factors.primes))]
    assert factors.of(1_204_224 * first).at(widths) == 1_204_224 * 3
    assert factors.of(32 * first * (9 * first + 1)).at(widths) == 32 * 3 * (9 * 3 + 1)
    for terms, size in factors.known.items():
        assert len(terms) == 1 or all(size % prime for prime in factors.primes)


class Typed(torch.nn.Module):
    """Two convolutions, one of which is depthwise, and a linear layer; two classes."""

    def __init__(self, dtype, channels=24):
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, padding=1, dtype=dtype)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1, groups=channels, dtype=dtype)
        self.head = torch.nn.Linear(channels, 2, dtype=dtype)

    def forward(self, x):
        x = self.second(torch.relu(self.first(x.to(self.head.weight.dtype))))
        return self.head(torch.relu(x).mean((2, 3)))


def followed_peak(module, shape, dtype=torch.float32):
    cost = follow(module, 8, shape, dtype, 2).cost(8, "adam")
    return cost.peak_training_memory_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_entries_of_another_type_are_counted_by_their_size(dtype):
    """Of a linear layer everything but the labels: its input, weights, gradients and the optimizer's state."""
    labels = 8 * torch.int64.itemsize

    def peak(kind):
        return followed_peak(lambda: torch.nn.Linear(4096, 2, dtype=kind), (4096,), kind) - labels

    assert peak(dtype) == pytest.approx(peak(torch.float32) * dtype.itemsize / 4, rel=0.001)


def test_copies_of_convolutions_go_by_the_size_of_an_entry():
    floats, halves = (followed_peak(lambda d=d: Typed(d), (1, 32, 32)) for d in (torch.float32, torch.bfloat16))
    assert halves < 0.65 * floats


@pytest.mark.parametrize("kernel", [1, 3])
def test_without_onednn_a_convolution_unfolds_its_input(kernel):
    """Of 8 x 24 x 32 x 32 values each becomes 9, which lie beside the result while it is computed."""
    values = 8 * 24 * 32 * 32 * 8

    def module():
        convolution = torch.nn.Conv2d(24, 24, kernel, padding=kernel // 2, dtype=torch.float64)
        return torch.nn.Sequential(convolution, torch.nn.Flatten(), torch.nn.AvgPool1d(12 * 32 * 32))

    found = followed_peak(module, (24, 32, 32), torch.float64)
    assert found == pytest.approx((2 + (9 if kernel > 1 else 1)) * values, rel=0.05)


@pytest.mark.parametrize(("groups", "padded"), [(1, 32 * 32), (24, 24), (4, 24 * 6)])
def test_weights_of_grouped_convolutions_are_not_padded(groups, padded):
    """oneDNN's copy of the weights beside those of a tiny input and result, in blocks of 16 channels."""
    weight, image = (24, 24 // groups, 31, 31), (1, 24, 1, 1)
    assert forward_copies(image, weight, image) == 4 * (padded * 31 * 31 + 2 * 32)
    first = backward_copies(image, image, weight, strided=False, first=True, bias=False)
    assert first == 4 * (padded * 31 * 31 + math.prod(weight))
