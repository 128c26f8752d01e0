"""Modules of kinds that people bring, each with an operator, a buffer or a name that others lack."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class Layers(nn.Module):
    """Two layers and a head, of which `between` computes something in the middle: (batch, 16) -> (batch, 16)."""

    def __init__(self, classes):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 16), nn.Linear(16, 24), nn.Linear(24, classes)

    def between(self, x):
        return x

    def forward(self, images):
        return self.head(self.second(self.between(self.first(images.flatten(1)))).relu())


class Cells(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.gru, self.lstm, self.plain = nn.GRUCell(16, 12), nn.LSTMCell(12, 10), nn.RNNCell(10, 16)

    def between(self, x):
        h = self.gru(x, x.new_zeros(len(x), 12))
        return self.plain(self.lstm(h, self.lstm(h))[0])


class Ellipsis(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def between(self, x):
        return torch.einsum("...i,ij", torch.einsum("...i,ij->...j", x[:, None], self.weight)[:, 0], self.weight)


class Aliases(Layers):
    def between(self, x):
        y = torch.multiply(x, 2).clip(-1, 1).subtract(x.absolute()).square_()
        pair = torch.hstack([y, x.tile(1, 1)]).view(-1, 2, 16).mT.mean(2)
        return pair + torch.distributions.Normal(y, 1.0, validate_args=False).mean.broadcast_to(x.shape)


class Shuffled(Layers):
    """Images that are sampled up and down, with transposed convolutions in groups."""

    def __init__(self, classes):
        super().__init__(classes)
        self.wide, self.narrow = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(32, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2, groups=2)

    def forward(self, images):
        x = self.narrow(F.pixel_unshuffle(self.wide(images).relu(), 2)).relu()
        return super().forward(F.adaptive_avg_pool2d(self.up(x), 8).sum(1))


class Spectra(Layers):
    """Weights of frequencies, as in a Fourier neural operator."""

    def __init__(self, classes):
        super().__init__(classes)
        self.lift, self.weight = nn.Conv2d(1, 8, 1), nn.Parameter(torch.randn(8, 8, 8, 5, 2))

    def forward(self, images):
        x = torch.fft.rfft2(self.lift(images))
        x = torch.einsum("bixy,ioxy->boxy", x, torch.view_as_complex(self.weight))
        return super().forward(torch.fft.irfft2(x, s=(8, 8)).sum(1))


class Bags(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.first = nn.EmbeddingBag(20, 16, mode="mean")

    def forward(self, tokens):
        return self.head(self.second(self.first(tokens)).relu())


class Spectral(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.first = parametrizations.spectral_norm(self.first)


class Means(Layers):
    """A running mean of its own."""

    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("mean", torch.zeros(16))

    def between(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Masked(Layers):
    """A mask of attention, which has entries that are not finite."""

    def __init__(self, classes):
        super().__init__(classes)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.row = nn.Linear(8, 16)

    def forward(self, images):
        x = self.row(images[:, 0])
        x = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        return self.head(self.second(x.mean(1)).relu())


class Named(Layers):
    """Parameters and parts with names that programs have for something else."""

    def __init__(self, classes):
        super().__init__(classes)
        self.scale, self.early = nn.Parameter(torch.tensor(2.0)), nn.Linear(16, 16)
        self.exits, self.steps = nn.ModuleList([nn.Linear(16, 16)]), nn.BatchNorm1d(16)

    def between(self, x):
        return self.scale * self.exits[0](self.steps(self.early(x)).relu())


class Spare(Layers):
    """A layer that nothing reads."""

    def __init__(self, classes):
        super().__init__(classes)
        self.spare = nn.Linear(100, 100)


class Complex(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.complex64))

    def between(self, x):
        return (x * self.weight).real


class Sparse(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("neighbors", torch.eye(16).to_sparse())

    def between(self, x):
        return x @ self.neighbors


class Infinite(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.gain = nn.Parameter(torch.full((16,), float("inf")))

    def between(self, x):
        return x * self.gain


class Double(Layers):
    def __init__(self, classes):
        super().__init__(classes)
        self.double()


class Assigned(Means):
    def between(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Shifted(Layers):
    """Writes into parts of a tensor."""

    def between(self, x):
        out = torch.zeros_like(x)
        out[:, :4] = x[:, :4]
        return out.relu()


class One(Layers):
    def forward(self, images):
        return {"logits": super().forward(images)}


class Dropping(Layers):
    def between(self, x):
        return F.dropout(x.relu(), 0.3, self.training)


class AlwaysDropping(Layers):
    """Also in evaluation, with another share: the module's first node in both modes that drops."""

    def between(self, x):
        return F.dropout(x.relu(), 0.3 if self.training else 0.6)


class Counted(Layers):
    """Numbers of examples as floats, numbers drawn for each example, and numbers put together."""

    def between(self, x):
        numbers = torch.arange(1.0, 2.0 * x.shape[0] + 1.0, 2.0) + 0 * torch.normal(0.0, 1.0, (x.shape[0],))
        return x * (1 + numbers[:, None] / 10) + torch.hstack([x.sum(), x.sum()]).tanh().sum()


class Backwards(Layers):
    def between(self, x):
        return x * torch.arange(x.shape[0] - 1, -1, -1)[:, None]


class Fractions(Layers):
    def between(self, x):
        return x * torch.arange(0, x.shape[0] / 2, 0.5)[:, None]


class Imaginary(Layers):
    def between(self, x):
        return (torch.complex(x, x) * 1j).real


class LastOffset(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 12, include_last_offset=True)
        self.first = nn.Linear(12, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, tokens):
        examples, length = tokens.shape
        return self.head(self.first(self.bag(tokens.flatten(), torch.arange(0, examples * length + 1, length))).relu())


class NamedAsNodes(Layers):
    """Parts of its own have names like those that a program gives."""

    def __init__(self, classes):
        super().__init__(classes)
        for number in range(12):
            setattr(self, f"_dropout{number}", nn.Linear(1, 1))

    def between(self, x):
        for number in range(12):
            x = x * getattr(self, f"_dropout{number}").weight
        return F.dropout(x.relu(), 0.3, self.training)


class Noisy(Layers):
    def between(self, x):
        return x + torch.rand_like(x) if self.training else x


class Halved(Layers):
    """Of numbers of 16 bits."""

    def __init__(self, classes):
        super().__init__(classes)
        self.bfloat16()

    def forward(self, images):
        return super().forward(images.bfloat16()).float()


class ByHand(Layers):
    """Layers of `Layers` written as products with weights; `way` says how."""

    def __init__(self, classes, way="layers"):
        super().__init__(classes)
        self.way = way

    def between(self, x):
        weight, bias = self.second.weight, self.second.bias
        return {
            "layers": lambda: self.second(x),
            "matmul": lambda: bias + x @ weight.T,
            "addmm": lambda: torch.addmm(bias, x, weight.T),
            "einsum": lambda: torch.einsum("bi,oi->bo", x, weight) + bias,
            "columns": lambda: (bias[:, None] + torch.matmul(weight, x[..., None]))[..., 0],
        }[self.way]()

    def forward(self, images):
        return self.head(self.between(self.first(images.flatten(1)).relu()).relu())


class Products(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.bias = nn.Parameter(torch.randn(64, 12) / 8), nn.Parameter(torch.zeros(12))
        self.second, self.head = nn.Parameter(torch.randn(12, 10) / 3), nn.Linear(10, classes)

    def forward(self, images):
        x = torch.tanh(images.flatten(1) @ self.first + self.bias)
        return self.head(torch.tanh(x @ self.second))


class Still(Layers):
    """With a buffer and a parameter that no gradient moves."""

    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("shift", torch.randn(16))
        self.slope = nn.Parameter(torch.ones(16), requires_grad=False)

    def between(self, x):
        return x * self.slope + self.shift
