"""MobileNets with torchvision's weights beside torchvision's own.

Not part of `make test`: torchvision's usual wheel cannot be imported beside a CPU build of torch. Where both are
installed: pytest tests/models/with_torchvision.py
"""

import pytest
import torch
import torchvision

from wildflower.models.mobilenet import MobileNetV2, MobileNetV3, placed


@pytest.mark.parametrize(("family", "function"), [(MobileNetV2, "mobilenet_v2"), (MobileNetV3, "mobilenet_v3_large")])
def test_torchvisions_weights_give_torchvisions_outputs(family, function):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, function)(num_classes=10).eval()
    for tensor in theirs.buffers():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand_like(tensor))
    family = family(input_shape=(3, 64, 64), halvings=5)
    state = theirs.state_dict()
    names = family.torchvision_names()
    assert {name for name in state if not name.endswith("num_batches_tracked")} == set(names.values())
    ours = family.build(family.plain()).eval()
    ours.load_state_dict(placed(state, names))
    inputs = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(inputs), theirs(inputs), rtol=1e-4, atol=1e-5)
