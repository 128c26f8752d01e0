import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wildflower.messages.packing import Layout, MessageError, pack, unpack

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 7 * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_float_type_comes_back_bit_for_bit(dtype):
    state = {"weight": filled(dtype, 3, 5), "bias": filled(dtype, 3)}
    layout = Layout.of(state)
    data = pack(state, layout)
    assert len(data) == 18 * dtype.itemsize
    back = unpack(data, layout)
    assert list(back) == ["weight", "bias"]
    for name, value in state.items():
        assert back[name].dtype == dtype
        assert back[name].shape == value.shape
        assert bits(back[name]) == bits(value)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_mixed_types_are_aligned_and_come_back(tensors):
    state = {f"t{i}": filled(dtype, *shape) for i, (dtype, shape) in enumerate(tensors)}
    layout = Layout.of(state)
    end = 0
    for entry in layout.entries:
        assert entry.offset_bytes % entry.dtype.itemsize == 0
        assert end <= entry.offset_bytes < end + entry.dtype.itemsize
        end = entry.offset_bytes + entry.nbytes
    assert layout.nbytes == end
    back = unpack(pack(state, layout), layout)
    for name, value in state.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name].double(), value.double())


def test_the_bytes_of_a_layout_are_these():
    # One byte of fp8 1.0 (0x38), a gap of three, then 2.0 as a little-endian float32.
    state = {"a": torch.ones(1).to(torch.float8_e4m3fn), "b": torch.tensor([2.0])}
    assert pack(state, Layout.of(state)).hex() == "38000000" + "00000040"


def test_a_view_and_a_parameter_are_packed_by_value():
    weight = torch.arange(6.0).view(2, 3)
    state = {"w": torch.nn.Parameter(weight.t())}
    assert torch.equal(unpack(pack(state, Layout.of(state)), Layout.of(state))["w"], weight.t())


@pytest.mark.parametrize("change", [-1, 1, -24])
def test_a_wrong_length_is_refused(change):
    layout = Layout.of({"w": torch.zeros(2, 3)})
    with pytest.raises(MessageError, match=rf"{24 + change} bytes instead of 24"):
        unpack(bytes(24 + change), layout)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.zeros(2, 3)}, "missing tensor 'bias'"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "scale": torch.zeros(1)}, "extra tensor 'scale'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, "tensor 'weight' has shape [3, 2] instead of [2, 3]"),
        (
            {"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(2)},
            "tensor 'weight' has dtype torch.float16 instead of torch.float32",
        ),
        ({"bias": torch.zeros(2), "weight": torch.zeros(2, 3)}, "the tensors come in another order"),
    ],
    ids=["missing", "extra", "shape", "dtype", "order"],
)
def test_packing_other_tensors_names_them(state, words):
    layout = Layout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    with pytest.raises(MessageError) as error:
        pack(state, layout)
    assert words in str(error.value)
    assert layout.digest != Layout.of(state).digest


def test_many_differences_are_counted_not_listed():
    layout = Layout.of({f"t{i}": torch.zeros(1) for i in range(8)})
    assert layout.difference(Layout.of({})).endswith("; and 3 more")


def test_a_digest_has_eight_bytes():
    layout = Layout.of({"w": filled(torch.bfloat16, 2, 3), "empty": torch.zeros(0), "scalar": torch.zeros(())})
    assert len(bytes.fromhex(layout.digest)) == 8
