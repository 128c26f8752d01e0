"""Networks of others, small enough that a round of any method takes a second.

Of `PLAIN` none needs more than PyTorch. Images are gray, (batch, 1, 8, 8), as the digits are; of `TEXTS` inputs are
tokens, (batch, 8). Those of `TAGGERS` answer for each token: a class of `transformers` and its family-arguments.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wildflower.tasks.data import Data, DataSet, Vocabulary
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.spec import Kind

PLAIN = ("mlp", "lstm", "unet")
TORCHVISION = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3", "efficientnet_b0", "densenet121"),
    *("convnext_tiny", "vit_b_16", "swin_t"),
)
TIMM = ("timm_vit_tiny",)
TEXTS = ("bert", "distilbert", "gpt2")
TAGGERS = {
    "bert_tagger": (
        "transformers:AutoModelForTokenClassification",
        "model = {model_type = 'bert', hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2, "
        "intermediate_size = 64}",
    )
}
TRANSFORMERS = (*TEXTS, *TAGGERS, "hf_vit")
MODELS = (*PLAIN, *TRANSFORMERS, *TORCHVISION, *TIMM)
VOCABULARY = 20
PADDING = 0

if find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
    # A torchvision that was built for another PyTorch lacks operators that nothing here uses, and is not imported.
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchvision() -> ModuleType:
    import torchvision.models

    return torchvision.models  # type: ignore[no-any-return]


def _sentences(data_dir: str) -> DataSet:
    """Return made texts: 8 tokens of which the class is the most frequent."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 10
    tokens = torch.randint(1, VOCABULARY, (400, 8), generator=generator)
    tokens = torch.where(torch.rand(400, 8, generator=generator) < 0.4, 1 + labels[:, None], tokens).to(torch.uint8)
    return DataSet(Data(tokens[:300], labels[:300]), Data(tokens[300:], labels[300:]), classes=10)


def _tagged(data_dir: str) -> DataSet:
    """Return made texts of 4 to 8 tokens, of which each but the first is tagged with the class of the one before it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (400, 8), generator=generator)
    padding = torch.arange(8) >= torch.randint(4, 9, (400, 1), generator=generator)
    labels = (tokens.roll(1, dims=1) % 4).masked_fill(padding, NO_LABEL)
    labels[:, 0] = NO_LABEL
    tokens = tokens.masked_fill(padding, PADDING).int()
    parts = [Data(tokens[part], labels[part]) for part in (slice(300), slice(300, None))]
    return DataSet(*parts, classes=4, vocabulary=Vocabulary(VOCABULARY, PADDING))


SENTENCES = Kind(_sentences, "bert-tiny", fixed=True)
TAGGED = Kind(_tagged, "bert-tiny", fixed=True)


def seen(images: Tensor) -> Tensor:
    """Return gray images as colored ones of 32 x 32."""
    return F.interpolate(images.expand(-1, 3, -1, -1), (32, 32))


class OnGray(nn.Module):
    """A network for colored images that gets gray ones, larger than they are."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        found = self.network(seen(images))
        answer: Tensor = getattr(found, "logits", found)
        return answer


def resnet18(classes: int) -> nn.Module:
    resnet = _torchvision().resnet
    return OnGray(resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=classes))


def mobilenet_v2(classes: int) -> nn.Module:
    return OnGray(_torchvision().mobilenet_v2(num_classes=classes, width_mult=0.25))


def mobilenet_v3(classes: int) -> nn.Module:
    return OnGray(_torchvision().mobilenet_v3_small(num_classes=classes, width_mult=0.25))


def efficientnet_b0(classes: int) -> nn.Module:
    efficientnet = _torchvision().efficientnet
    settings, last = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.5)
    return OnGray(efficientnet.EfficientNet(settings, dropout=0.2, last_channel=last, num_classes=classes))


def densenet121(classes: int) -> nn.Module:
    densenet = _torchvision().densenet
    return OnGray(densenet.DenseNet(8, (2, 2, 2, 2), 16, bn_size=2, num_classes=classes))


def convnext_tiny(classes: int) -> nn.Module:
    convnext = _torchvision().convnext
    setting = [
        convnext.CNBlockConfig(16, 32, 1),
        convnext.CNBlockConfig(32, 48, 2),
        convnext.CNBlockConfig(48, None, 1),
    ]
    return OnGray(convnext.ConvNeXt(setting, num_classes=classes))


def vit_b_16(classes: int) -> nn.Module:
    made = _torchvision().VisionTransformer(32, 8, 2, 2, hidden_dim=32, mlp_dim=64, num_classes=classes)
    return OnGray(made)


def swin_t(classes: int) -> nn.Module:
    made = _torchvision().SwinTransformer([4, 4], 16, [2, 2], [2, 2], window_size=[4, 4], num_classes=classes)
    return OnGray(made)


def timm_vit_tiny(classes: int) -> nn.Module:
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48}
    return OnGray(timm.create_model("vit_tiny_patch16_224", num_classes=classes, **sizes))


def _of_transformers(kind: str, classes: int, **sizes: int) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, num_labels=classes, **sizes)
    found: nn.Module = getattr(transformers, f"{kind}ForSequenceClassification")(made)
    return found


def bert(classes: int) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return _of_transformers("Bert", classes, **sizes)


def distilbert(classes: int) -> nn.Module:
    return _of_transformers("DistilBert", classes, dim=32, n_layers=2, n_heads=2, hidden_dim=64)


def gpt2(classes: int) -> nn.Module:
    return _of_transformers("GPT2", classes, n_embd=32, n_layer=2, n_head=2, pad_token_id=0)


def hf_vit(classes: int) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=classes, **sizes)
    return OnGray(transformers.ViTForImageClassification(config))


class Rows(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        out, _ = self.lstm(images.squeeze(1))
        answer: Tensor = self.head(out[:, -1])
        return answer


def lstm(classes: int) -> nn.Module:
    return Rows(classes)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down and up again, with what was seen on the way down beside; the answer is the mean over positions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        width = 8
        self.down = nn.ModuleList([_double(1, width), _double(width, 2 * width), _double(2 * width, 4 * width)])
        self.up = nn.ModuleList([_double(6 * width, 2 * width), _double(3 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for number, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if number else x)
            beside.append(x)
        for up, other in zip(self.up, reversed(beside[:-1]), strict=True):
            x = up(torch.cat([other, F.interpolate(x, scale_factor=2.0)], 1))
        answer: Tensor = self.head(x).mean((2, 3))
        return answer


def unet(classes: int) -> nn.Module:
    return UNet(classes)


def mlp(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes)
    )


def mobilenet_v2_on_gray(classes: int) -> nn.Module:
    """Return the whole MobileNetV2, with torchvision's names of tensors, which sees gray images at 32 x 32."""

    class Gray(_torchvision().MobileNetV2):  # type: ignore[misc]
        def forward(self, images: Tensor) -> Tensor:
            answer: Tensor = super().forward(seen(images))
            return answer

    return Gray(num_classes=classes)
