import pytest
import torch

from wildflower.models.cnn import Cnn3, PflCnn
from wildflower.models.placement import chosen, leading


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # conv 320 + 18,496 + 73,856, batch norm 64 + 128 + 256, classifier 128 x 3 x 3 x 10 + 10
        (Cnn3(), 104_650),
        # conv 896 + 18,496, fc 64 x 14 x 14 x 128 + 128 = 1,605,760, classifier 1,290
        (PflCnn(), 1_626_442),
    ],
)
def test_parameters(family, expected):
    assert sum(parameter.numel() for parameter in family.build(family.full()).parameters()) == expected


def test_pfl_cnn_has_no_norm():
    assert not any("norm" in name for name in PflCnn().tensors(PflCnn().full()))


def test_a_smaller_kernel_is_the_centre_of_the_whole_one():
    family = Cnn3(kernel=5)
    arch = family.architecture({"conv1": 2}, kernel=3)
    assert arch.kernels == (3, 3, 3)
    weights = family.build(family.full()).state_dict()
    for select in (leading, chosen(1)):
        cut = family.place(arch, select).gather(weights)["block1.conv.weight"]
        assert cut.shape == (2, 1, 3, 3)
        channels = torch.arange(32)[select("conv1", 32, 2)]
        assert torch.equal(cut, weights["block1.conv.weight"][channels][:, :, 1:4, 1:4])
    assert family.build(arch)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


@pytest.mark.parametrize("side", [1, 4, 7])
def test_kernels_out_of_bounds_are_refused(side):
    with pytest.raises(ValueError, match=f"kernel conv1 must be odd and 3 to 5, not {side}"):
        Cnn3(kernel=5).architecture(kernel=side)


@pytest.mark.parametrize("kernel", [0, 1, 4, "5"])
def test_a_kernel_is_an_odd_side(kernel):
    with pytest.raises(ValueError, match="kernel must be an odd side >= 3"):
        Cnn3(kernel=kernel)
