"""Networks of torchvision and timm on small gray images, for `benchmarks.any_model.methods`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _without_detection() -> None:
    """Let torchvision be imported beside a PyTorch that was built without its operators, of which none is used here."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_LIBRARY"] = library


class OnGray(nn.Module):
    """A network for colored images that gets gray ones, larger than they are."""

    def __init__(self, network: nn.Module, side: int = 32) -> None:
        super().__init__()
        self.network, self.side = network, side

    def forward(self, images: Tensor) -> Tensor:
        return self.network(F.interpolate(images.expand(-1, 3, -1, -1), (self.side, self.side)))


def _torchvision(name: str, classes: int) -> nn.Module:
    if not hasattr(torch.ops.torchvision, "nms"):
        _without_detection()
    import torchvision.models

    return OnGray(getattr(torchvision.models, name)(num_classes=classes))


def resnet18(classes: int) -> nn.Module:
    return _torchvision("resnet18", classes)


def mobilenet_v2(classes: int) -> nn.Module:
    return _torchvision("mobilenet_v2", classes)


def mobilenet_v3(classes: int) -> nn.Module:
    return _torchvision("mobilenet_v3_small", classes)


def efficientnet_b0(classes: int) -> nn.Module:
    return _torchvision("efficientnet_b0", classes)


def densenet121(classes: int) -> nn.Module:
    return _torchvision("densenet121", classes)


def swin(classes: int) -> nn.Module:
    return _torchvision("swin_t", classes)


def vit_tiny(classes: int) -> nn.Module:
    import timm

    return OnGray(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=classes))
