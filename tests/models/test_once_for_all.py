"""Published once-for-all weights, by names and a forward pass written down from the paper and its repository."""

import pytest
import torch
import torch.nn.functional as F

from wildflower.models.mobilenet import MobileNetV3
from wildflower.models.once_for_all import once_for_all, transformed

FAMILY = MobileNetV3(
    input_shape=(3, 32, 32), classes=5, stage_channels=(16, 8, 8, 8, 8, 8), depths=(1, 2), expand_ratios=(1, 2)
)
STAGES = [(8, False), (8, True), (8, False), (8, True), (8, True)]  # channels, and whether blocks are gated


def published():
    """A state dict with the names that the repository's OFAMobileNetV3 has."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def draw(name, *shape):
        state[name] = 0.2 * torch.randn(shape, generator=generator)

    def norm(name, channels):
        for part in ("weight", "bias", "running_mean"):
            draw(f"{name}.{part}", channels)
        state[f"{name}.running_var"] = 0.001 + torch.rand(channels, generator=generator)
        state[f"{name}.num_batches_tracked"] = torch.tensor(3)

    draw("first_conv.conv.weight", 16, 3, 3, 3)
    norm("first_conv.bn", 16)
    before = "blocks.0.mobile_inverted_conv"
    draw(f"{before}.depth_conv.conv.weight", 16, 1, 3, 3)
    norm(f"{before}.depth_conv.bn", 16)
    draw(f"{before}.point_linear.conv.weight", 16, 16, 1, 1)
    norm(f"{before}.point_linear.bn", 16)
    inputs, number = 16, 0
    for channels, gated in STAGES:
        for _ in range(2):
            number += 1
            block, inner = f"blocks.{number}.mobile_inverted_conv", 2 * inputs
            draw(f"{block}.inverted_bottleneck.conv.conv.weight", inner, inputs, 1, 1)
            norm(f"{block}.inverted_bottleneck.bn.bn", inner)
            draw(f"{block}.depth_conv.conv.conv.weight", inner, 1, 7, 7)
            draw(f"{block}.depth_conv.conv.7to5_matrix", 25, 25)
            draw(f"{block}.depth_conv.conv.5to3_matrix", 9, 9)
            norm(f"{block}.depth_conv.bn.bn", inner)
            if gated:
                draw(f"{block}.depth_conv.se.fc.reduce.weight", 8, inner, 1, 1)
                draw(f"{block}.depth_conv.se.fc.reduce.bias", 8)
                draw(f"{block}.depth_conv.se.fc.expand.weight", inner, 8, 1, 1)
                draw(f"{block}.depth_conv.se.fc.expand.bias", inner)
            draw(f"{block}.point_linear.conv.conv.weight", channels, inner, 1, 1)
            norm(f"{block}.point_linear.bn.bn", channels)
            inputs = channels
    draw("final_expand_layer.conv.weight", 48, 8, 1, 1)
    norm("final_expand_layer.bn", 48)
    draw("feature_mix_layer.conv.weight", 1280, 48, 1, 1)
    draw("classifier.linear.weight", 5, 1280)
    draw("classifier.linear.bias", 5)
    return state


def smaller(kernel, side, state, block):
    """The kernel of `side`, entry by entry: w'[c, i] = sum_j M[i, j] (middle of w)[c, j]."""
    for larger in (7, 5):
        if larger > side:
            matrix = state[f"{block}.depth_conv.conv.{larger}to{larger - 2}_matrix"]
            new = torch.empty(len(kernel), 1, larger - 2, larger - 2)
            for c in range(len(kernel)):
                middle = [float(kernel[c, 0, y, x]) for y in range(1, larger - 1) for x in range(1, larger - 1)]
                for i in range(len(middle)):
                    new[c, 0, i // (larger - 2), i % (larger - 2)] = sum(
                        float(matrix[i, j]) * middle[j] for j in range(len(middle))
                    )
            kernel = new
    return kernel


def forward(state, x, strides, depth, ratio, side):
    """Once-for-all's network with the same depth, ratio and kernel everywhere, in evaluation mode."""

    def norm(x, name):
        n = x.shape[1]
        parts = [state[f"{name}.{part}"][:n] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *parts, eps=1e-5)

    def w(name, *sizes):
        return state[name][tuple(slice(size) for size in sizes)]

    x = F.hardswish(norm(F.conv2d(x, w("first_conv.conv.weight"), stride=strides[0], padding=1), "first_conv.bn"))
    block = "blocks.0.mobile_inverted_conv"
    y = F.relu(norm(F.conv2d(x, w(f"{block}.depth_conv.conv.weight"), padding=1, groups=16), f"{block}.depth_conv.bn"))
    x = x + norm(F.conv2d(y, w(f"{block}.point_linear.conv.weight")), f"{block}.point_linear.bn")
    for stage, (_, gated) in enumerate(STAGES):
        act = F.hardswish if stage >= 2 else F.relu
        for place in range(depth):
            block = f"blocks.{1 + 2 * stage + place}.mobile_inverted_conv"
            inner = ratio * x.shape[1]
            y = F.conv2d(x, w(f"{block}.inverted_bottleneck.conv.conv.weight", inner))
            y = act(norm(y, f"{block}.inverted_bottleneck.bn.bn"))
            kernel = smaller(w(f"{block}.depth_conv.conv.conv.weight", inner), side, state, block)
            stride = 1 if place else strides[stage + 1]
            y = F.conv2d(y, kernel, stride=stride, padding=side // 2, groups=inner)
            y = act(norm(y, f"{block}.depth_conv.bn.bn"))
            if gated:
                se = f"{block}.depth_conv.se.fc"
                z = F.conv2d(y.mean((2, 3), keepdim=True), w(f"{se}.reduce.weight", 8, inner), w(f"{se}.reduce.bias"))
                z = F.conv2d(F.relu(z), w(f"{se}.expand.weight", inner), w(f"{se}.expand.bias", inner))
                y = y * F.hardsigmoid(z)
            y = F.conv2d(y, w(f"{block}.point_linear.conv.conv.weight", 8, inner))
            y = norm(y, f"{block}.point_linear.bn.bn")
            x = x + y if place else y
    x = F.hardswish(norm(F.conv2d(x, w("final_expand_layer.conv.weight")), "final_expand_layer.bn"))
    x = F.hardswish(F.conv2d(x.mean((2, 3), keepdim=True), w("feature_mix_layer.conv.weight"))).flatten(1)
    return F.linear(x, w("classifier.linear.weight"), w("classifier.linear.bias"))


@pytest.mark.parametrize(("depth", "ratio", "side"), [(2, 2, 7), (1, 2, 5), (2, 1, 3)])
def test_a_sub_network_says_what_once_for_all_says(depth, ratio, side):
    state = published()
    values = {
        d.name: {"depth": depth, "expand": ratio, "kernel": side}[d.name.rpartition(".")[2]] for d in FAMILY.decisions
    }
    architecture = FAMILY.chosen(values)
    network = FAMILY.build(architecture).eval()
    network.load_state_dict(once_for_all(state, FAMILY, architecture))
    inputs = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = forward(state, inputs, FAMILY.strides, depth, ratio, side)
    assert expected.std() > 1e-3
    torch.testing.assert_close(network(inputs), expected, rtol=1e-3, atol=1e-5)


def test_an_identity_keeps_the_middle():
    kernel = torch.rand(4, 1, 7, 7)
    assert torch.equal(transformed(kernel, torch.eye(25)), kernel[..., 1:6, 1:6])


def test_a_file_of_another_network_is_refused():
    state = published()
    with pytest.raises(ValueError, match=r"has no first_conv\.conv\.weight: take the state_dict"):
        once_for_all({}, FAMILY, FAMILY.full())
    wide = MobileNetV3(input_shape=(3, 32, 32), classes=5, stage_channels=(16, 8, 8, 8, 8, 8), depths=(1, 2))
    with pytest.raises(ValueError, match=r"inverted_bottleneck\.conv\.weight has the shape .* must be those of"):
        once_for_all(state, wide, wide.full())
    name = next(name for name in state if name.endswith("7to5_matrix"))
    with pytest.raises(ValueError, match=r"7to5_matrix has the shape \(9, 9\), not \(25, 25\)"):
        once_for_all(state | {name: torch.eye(9)}, FAMILY, FAMILY.smallest())
