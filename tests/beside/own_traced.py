"""Plain modules as users write them, and some that cannot be traced."""

import torch
import torch.nn.functional as F
from torch import nn

from wildflower.models.family import make_family


class Dense(nn.Module):
    """Branches of one stream, each a layer of its own."""

    def __init__(self, classes, layers=3, hidden=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden))
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, images):
        x = self.stem(images)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


class Adapting(Dense):
    """With a part that is called as what is added to models of `transformers`."""

    def __init__(self, classes):
        super().__init__(classes)
        self.stem.add_module("adapter", nn.Linear(12, 12))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        return F.relu(y, inplace=True)


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 12, 2), Block(12, 12, 1))
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Separable(nn.Module):
    """Depthwise convolutions, groups, a squeeze and a group norm."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.squeeze, self.excite = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 12, 1)
        self.norm = nn.GroupNorm(4, 12)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(12 * 64, classes))

    def forward(self, x):
        x = self.grouped(F.hardswish(self.depthwise(self.stem(x))))
        x = x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(self.norm(x).flatten(1))


class Dense2(nn.Module):
    """Concatenations, as in DenseNet and Inception."""

    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.one, self.two = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(10, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(14)
        self.head = nn.Linear(14, classes)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, torch.relu(self.one(x))], 1)
        x = torch.cat([x, torch.relu(self.two(x))], 1)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class Colored(nn.Module):
    """A network for colored images on gray ones."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, classes)

    def forward(self, images):
        return self.head(self.stem(images.expand(-1, 3, -1, -1)).mean((2, 3)))


class Attention(nn.Module):
    """Queries, keys and values by one projection, of which heads are cut."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(batch, length, hidden))


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self, classes, hidden=16, layers=2):
        super().__init__()
        self.patch = nn.Conv2d(1, hidden, 2, 2)
        self.token, self.place = nn.Parameter(torch.randn(1, 1, hidden)), nn.Parameter(torch.randn(1, 17, hidden))
        self.blocks = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "norm1": nn.LayerNorm(hidden),
                        "attention": Attention(hidden, 4),
                        "norm2": nn.LayerNorm(hidden),
                        "mlp": nn.Sequential(nn.Linear(hidden, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, hidden)),
                    }
                )
                for _ in range(layers)
            ]
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        return self.head(self.norm(x)[:, 0])


class Words(nn.Module):
    """An LSTM over tokens."""

    def __init__(self, classes):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 10, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, classes)

    def forward(self, tokens):
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


class Tied(nn.Module):
    """A model of the next token, whose table of embeddings is also its head."""

    def __init__(self, classes):
        super().__init__()
        self.words = nn.Embedding(classes, 8)
        self.mid = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.head = nn.Linear(8, classes, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("weights", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, tokens):
        x = (self.words(tokens) * self.weights[:, None]).sum(1)
        return self.head(x + self.mid(x))


class ByValue(Dense):
    def forward(self, images):
        x = self.stem(images)
        if x.mean() > 0:
            x = x * 2
        return self.head(x)


class CountingBatches(Dense):
    def __init__(self, classes):
        super().__init__(classes)
        self.norm = nn.BatchNorm1d(classes, momentum=None)

    def forward(self, images):
        return self.norm(super().forward(images))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnBackward(Dense):
    def forward(self, images):
        return self.head(Squared.apply(self.stem(images)))


class TwoInputs(Dense):
    def forward(self, images, lengths):
        return self.head(self.stem(images) + lengths)


class Pair(Dense):
    def forward(self, images):
        x = self.stem(images)
        return self.head(x), x


class NotABatch(Dense):
    def forward(self, images):
        return self.head(self.stem(images)).mean(0)


class WithoutGradients(Dense):
    def forward(self, images):
        with torch.set_grad_enabled(False):
            x = self.stem(images)
        return self.head(x)


class BySize(Dense):
    def forward(self, images):
        return self.head(self.stem(images)) * len(images)


class ChangesInput(Dense):
    def forward(self, images):
        images -= 0.5
        return super().forward(images)


class ReadsAValue(Dense):
    def forward(self, images):
        x = self.stem(images)
        return self.head(x * x.max().item())


class SharesMemory(Dense):
    def __init__(self, classes):
        super().__init__(classes)
        self.last = nn.Parameter(self.head.weight.detach()[:, :4])

    def forward(self, images):
        return super().forward(images) + self.last.sum(1)


class Lazy(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

    def forward(self, images):
        return self.head(images)


class MostlyPinned(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, images):
        x = images.flatten(1)
        return self.head(x + self.first(x))


class Whole(nn.Linear):
    def __init__(self, classes):
        super().__init__(64, classes)

    def forward(self, images):
        return super().forward(images.flatten(1))


class WrongClasses(Dense):
    def __init__(self):
        super().__init__(7)


class Placed(nn.Module):
    """Patches of an image, with a table of embeddings for their positions."""

    def __init__(self, classes):
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, 8, 4, stride=4), nn.Embedding(4, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head((self.patches(x).flatten(2).transpose(1, 2) + self.positions(torch.arange(4))).relu().mean(1))


def described(spec, input_shape, classes):
    """Return the whole network of a built-in family as a module."""
    family = make_family({**spec, "input_shape": list(input_shape), "classes": classes})
    return family.build(family.full())


class Gated(nn.Module):
    """Gated linear units, a grid of positions, and a head that is normalized by its weights."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.mix = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, classes))
        self.turned = nn.Parameter(torch.eye(2, 3))

    def forward(self, x):
        grid = F.affine_grid(self.turned.expand(x.shape[0], 2, 3), [x.shape[0], 6, 4, 4], align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.head(self.mix(F.glu(self.stem(x), 1)).exp2().moveaxis(1, -1).mean((1, 2)))


class Labels(nn.Module):
    """A label for each token."""

    def __init__(self, classes):
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 12), nn.Linear(12, classes)

    def forward(self, tokens):
        return self.head(self.hidden(self.words(tokens)).relu()).transpose(1, 2)


class Signals(nn.Module):
    """A label for each token, by convolutions over positions, of which one sees every second."""

    def __init__(self, classes):
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(256, 8), nn.Conv1d(8, 10, 3, padding=1), nn.Conv1d(10, 12, 1)
        self.every_second, self.head = nn.Conv1d(12, 12, 2, stride=2), nn.Conv1d(12, classes, 1)

    def forward(self, tokens):
        x = self.second(self.first(self.words(tokens).transpose(1, 2)).relu()).relu()
        return self.head(self.every_second(x).repeat_interleave(2, 2))


class Reader(nn.Module):
    """A label for each token, by LSTMs that read on."""

    def __init__(self, classes):
        super().__init__()
        self.words, self.head = nn.Embedding(256, 8), nn.Linear(12, classes)
        self.layers = nn.ModuleList([nn.LSTM(8, 12, batch_first=True), nn.LSTM(12, 12, batch_first=True)])

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x).transpose(1, 2)


class Scores(nn.Module):
    """Attention over the rows of an image by scores that are masked, in 4 heads."""

    def __init__(self, classes, hidden=16):
        super().__init__()
        self.rows, self.qkv = nn.Linear(8, hidden), nn.Linear(hidden, 3 * hidden)
        self.out, self.head = nn.Linear(hidden, hidden), nn.Linear(hidden, classes)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, images):
        x = self.rows(images.squeeze(1))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).masked_fill(self.mask, -1e9).softmax(-1)
        return self.head((x + self.out((scores @ v).transpose(1, 2).flatten(2))).mean(1))


class Recurrent(nn.Module):
    """Two layers of a kind that read an image row by row, in both directions."""

    def __init__(self, classes, kind="GRU", hidden=8, **options):
        super().__init__()
        self.rows = getattr(nn, kind)(8, hidden, 2, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, images):
        return self.head(self.rows(images.squeeze(1))[0].mean(1))


def passing_on(hidden=12, **others):
    """As torchvision's and timm's functions are: what the module's constructor wants is not among its parameters."""
    return PassedOn(hidden=hidden, **others)


def not_passing_on(classes, **others):
    if others:
        raise TypeError(f"got an unexpected keyword argument '{next(iter(others))}'")
    return Dense(classes)


def taking_others(**others):
    """Takes what it does not name, but not the number of classes."""
    if "num_classes" in others:
        raise TypeError("taking_others() got an unexpected keyword argument 'num_classes'")
    return Dense(10)


class PassedOn(Dense):
    def __init__(self, num_classes=1000, hidden=12):
        super().__init__(num_classes, hidden=hidden)


class ThreeChannels(Dense):
    """Takes images of three channels."""

    def __init__(self, classes):
        super().__init__(classes)
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 8), nn.Flatten())


class Auxiliary(Dense):
    """Draws for an answer that nobody reads, before it draws for its own."""

    def __init__(self, classes):
        super().__init__(classes)
        self.further = nn.Linear(12, classes)

    def forward(self, images):
        x = self.stem(images)
        if self.training:
            self.further(F.dropout(x, 0.7))
        return self.head(F.dropout(x, 0.5, self.training))


class Scaled(nn.Module):
    """Two residual additions of what is normalized in float32, with a table of the whole network's, as Llama has."""

    def __init__(self, hidden):
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(hidden)), nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden)

    def normalized(self, x):
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.scale

    def forward(self, x, table):
        x = x + torch.tanh(self.first(self.normalized(x)) * table.mean())
        return x + torch.tanh(self.second(self.normalized(x)))


class RootMeans(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
        self.register_buffer("table", torch.linspace(0, 1, 12))
        self.blocks = nn.ModuleList([Scaled(12) for _ in range(3)])
        self.head = nn.Linear(12, classes)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(x)


class MaskedWords(nn.Module):
    """Convolutions over the tokens of a text, of which those that pad it, 0, are left out everywhere.

    halved: whether the first one halves the positions, which then are no longer those of the tokens.
    """

    def __init__(self, classes, halved=False):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.convolutions = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(2))
        self.halve = nn.MaxPool1d(2) if halved else nn.Identity()
        self.last, self.head = nn.Conv1d(8, 8, 1, bias=False), nn.Linear(8, classes)

    def forward(self, tokens):
        real = (tokens != 0).unsqueeze(1)
        x = self.words(tokens).transpose(1, 2)
        for convolution in self.convolutions:
            x = convolution(x * real).relu()
        return self.head(self.last(self.halve(x * real)).relu().amax(2))


class Ordered(nn.Module):
    """A head whose answers are put into another order, summed up, or mixed by numbers that are not learned."""

    def __init__(self, classes, order):
        super().__init__()
        self.inner, self.head, self.order = nn.Linear(64, 12), nn.Linear(12, classes), order
        if order == "mix":
            self.register_buffer("mixed", torch.eye(classes) + 0.1)

    def forward(self, x):
        answer = self.head(self.inner(x.flatten(1)).relu())
        if self.order == "mix":
            return answer @ self.mixed
        return {"none": answer, "flip": answer.flip(1), "roll": answer.roll(1, 1), "sum": answer.cumsum(1)}[self.order]
