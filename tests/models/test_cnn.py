import pytest

from models.cnn import Cnn3, PflCnn


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
