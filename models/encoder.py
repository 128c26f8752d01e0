"""Encoders of Hugging Face `transformers`: BERT, RoBERTa, DistilBERT, and models of their shape such as MiniLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.base import check_cut, is_count, lies_in
from wildflower.models.encoder_parts import KINDS, Adapted, Classifier, LowRank, linear_at
from wildflower.models.layers import TensorSpec
from wildflower.models.module import ModuleFamily
from wildflower.models.network import Network
from wildflower.models.placement import Coordinates, kept_channels
from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import nearest_part

# Parts that are trained in layers that are frozen, by their names inside of a layer.
ADDED = (".adapter.", ".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class Encoder(ModuleFamily):
    """A transformer encoder with a head: (batch, sequence) of int64 tokens -> (batch, classes).

    The sizes are MiniLM-L6's. `model` takes them from a folder of Hugging Face's, or from a model's name on its hub; in
    the family's spec they stand as numbers, so that nodes need no such folder. Where tokens are `pad_id`, nothing is
    attended to. `classes = 1` is a regression's one number.

    Of a pair of texts, [CLS] a [SEP] b [SEP], the second and the separator behind it are of token type 1, as BERT's
    tokenizer has it, where the model has more types than one. All else is of type 0.

    An architecture is what is kept of each head's channels (or of the heads), of the MLP's channels and of the layers,
    the first ones of each. `hidden` follows from the heads: transformers' own layers want it to be heads times channels
    of a head.

    Attributes:
        kind: "bert", "roberta" or "distilbert".
        depths: numbers of layers that devices may get, ascending; () where the run's widths say what they get.
        early_exits: whether there is a head of its own behind each of `depths` (DepthFL), "exit2" behind the second
            layer. A device then has all heads up to its depth; else every depth ends with the same "classifier".
        cut: what a width cuts, the "channels" of every head as HeteroFL does, or whole "heads".
        cut_mlp: whether it cuts the MLPs inside too.
        separator: the token behind each text of a pair, which a run takes from the task's tokenizer; -1: texts come
            alone, or the tokenizer gives all tokens of a pair the type 0.
        labels: "sequence", one per text, or "tokens", one per token: (batch, classes, sequence).
        pooling: what of a sequence the head reads: the "mean" over the tokens that are no padding, or the first, "cls".
        head: "linear", or "dense" with a layer and tanh in front, as RoBERTa's own.
        dropout: of embeddings, of each layer's two parts, and in front of the head.
        adapter: channels inside of adapters, of which every layer then has two, behind attention and behind the MLP;
            0: none. A width does not cut these channels.
        lora: rank of what is added to the weights W of every layer's queries and values, which then are
            W + (lora_alpha / lora) B A, at first W (LoRA, Hu et al. 2022); 0: nothing. A width does not cut the rank.
        lora_alpha: the numerator of that; 8 as in `peft`, whose names the tensors have as well.
        attention_dropout: of attention's weights. Above 0 PyTorch has no fused kernel on CPUs, so that all weights are
            kept: more memory and time.
    """

    name: ClassVar[str] = "encoder"
    input_dtype: ClassVar[torch.dtype] = torch.int64

    input_shape: tuple[int, ...] = (128,)
    kind: str = "bert"
    vocabulary: int = 30522
    hidden: int = 384
    depth: int = 6
    heads: int = 12
    mlp: int = 1536
    positions: int = 512
    token_types: int = 2
    pad_id: int = 0
    separator: int = -1
    dropout: float = 0.1
    attention_dropout: float = 0.0
    norm_eps: float = 1e-12
    activation: str = "gelu"
    depths: tuple[int, ...] = ()
    early_exits: bool = False
    cut: str = "channels"
    cut_mlp: bool = True
    labels: str = "sequence"
    pooling: str = "mean"
    head: str = "linear"
    adapter: int = 0
    lora: int = 0
    lora_alpha: float = 8.0
    model: str = ""

    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of `model` in place of its name."""
        found = dict(arguments)
        model = found.pop("model", "")
        if not model:
            return found
        if not isinstance(model, str):
            raise ValueError(f"encoder: model must be a folder or a name, not {model!r}")
        sizes = _sizes_of(model)
        for key, value in sizes.items():
            given = found.get(key, value)
            if key == "depth" and is_count(given) and given > value:
                raise ValueError(f"encoder: depth = {given}, but {model} has {value} layers")
            if given != value and key not in ("depth", "dropout"):
                raise ValueError(f"encoder: {key} = {given!r}, but {model} has {value!r}: leave it out")
        return sizes | found

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model:
            raise ValueError("encoder: make_family reads `model`; give the sizes themselves here")
        choices = {
            "kind": KINDS,
            "cut": ("channels", "heads"),
            "labels": ("sequence", "tokens"),
            "pooling": ("mean", "cls"),
            "head": ("linear", "dense"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"encoder: {field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}")
        self._check_counts("vocabulary", "hidden", "depth", "heads", "mlp", "positions", "token_types")
        if type(self.adapter) is not int or self.adapter < 0:
            raise ValueError(f"encoder: adapter must be a number of channels, or 0 for none, not {self.adapter!r}")
        if type(self.lora) is not int or not 0 <= self.lora <= self.hidden:
            raise ValueError(f"encoder: lora must be a rank of 1 to hidden = {self.hidden}, or 0, not {self.lora!r}")
        alpha = self.lora_alpha
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise ValueError(f"encoder: lora_alpha must be a finite number above 0, not {alpha!r}")
        for field in ("dropout", "attention_dropout"):
            value = getattr(self, field)
            if not isinstance(value, float | int) or not 0 <= value < 1:
                raise ValueError(f"encoder: {field} must be a number from 0 and below 1, not {value!r}")
        if type(self.pad_id) is not int or not 0 <= self.pad_id < self.vocabulary:
            raise ValueError(f"encoder: pad_id must be 0 to {self.vocabulary - 1}, not {self.pad_id!r}")
        if type(self.separator) is not int or not -1 <= self.separator < self.vocabulary:
            raise ValueError(
                f"encoder: separator must be 0 to {self.vocabulary - 1}, or -1 for none, not {self.separator!r}"
            )
        if self.hidden % self.heads:
            raise ValueError(f"encoder: hidden must be a multiple of heads, {self.hidden} is none of {self.heads}")
        # RoBERTa counts positions from the one behind its padding token.
        longest = self.positions - (self.pad_id + 1 if self.kind == "roberta" else 0)
        if len(self.input_shape) != 1 or self.input_shape[0] > longest:
            raise ValueError(
                f"encoder: it reads at most {longest} tokens, and its input_shape is {self.input_shape!r}: where texts "
                "are read, that is max_tokens of task-arguments"
            )
        depths = self.depths
        if not isinstance(depths, tuple) or not all(is_count(depth) for depth in depths):
            raise ValueError(f"encoder: depths must be numbers of layers such as [2, 4], not {depths!r}")
        if list(depths) != sorted(set(depths)) or (depths and depths[-1] > self.depth):
            raise ValueError(f"encoder: depths must ascend and end at most at depth = {self.depth}, not {list(depths)}")
        if type(self.early_exits) is not bool or (self.early_exits and len(depths) < 2):
            raise ValueError(
                f"encoder: early_exits = {self.early_exits!r} with depths = {list(depths)}: it is true or false, and "
                "where it is true depths must name two numbers of layers or more, such as [2, 4, 6]"
            )

    @property
    def pair_separator(self) -> int:
        """Return the separator; -1 if all tokens are of one type, as DistilBERT's are."""
        return self.separator if self.token_types > 1 and KINDS[self.kind].has_types else -1

    @property
    def head_channels(self) -> int:
        """Channels of one head of the whole model."""
        return self.hidden // self.heads

    @property
    def deepest(self) -> int:
        """Return how many layers the global model has."""
        return self.depths[-1] if self.depths else self.depth

    @property
    def groups(self) -> dict[str, int]:
        """Return each head's channels, or the heads; the MLP's channels if they are cut; the layers."""
        width = {"head_channels": self.head_channels} if self.cut == "channels" else {"heads": self.heads}
        return width | ({"mlp": self.mlp} if self.cut_mlp else {}) | {"layers": self.deepest}

    @cached_property
    def heads_behind(self) -> Mapping[int, str]:
        """Numbers of layers -> the head behind so many of them."""
        early = self.depths[:-1] if self.early_exits else ()
        return {depth: f"exit{depth}" for depth in early} | {self.deepest: "classifier"}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """Return the heads; what an architecture chooses is the same for all of them."""
        heads = self.heads_behind.values() if self.early_exits else ("head",)
        return {head: tuple(self.groups) for head in heads}

    def exit_of(self, arch: Architecture) -> int:
        """Return the number of the exit behind the architecture's last layer."""
        return 1 + list(self.heads_behind).index(arch.widths[-1]) if self.early_exits else 1

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """Return all layers are one stack."""
        where = KINDS[self.kind].where
        return {"encoder": tuple(f"{where}.layer.{number}" for number in range(self.deepest))}

    def full(self) -> Architecture:
        """Return the whole model; with `depths`, the deepest of them."""
        return self._at(self.deepest)

    def smallest(self) -> Architecture:
        """Return one layer of one channel per head (or one head) and one of the MLP; of `depths`, the first, whole."""
        return self._at(self.depths[0]) if self.depths else Architecture((1,) * len(self.groups))

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the whole depth at a rate of the width; of `depths`, the first with that share of the layers.

        With `early_exits` it is the depth of the exit, at that rate of the width.
        """
        check_cut(self.name, len(self.segments), exit, rate)
        if self.depths and not self.early_exits:
            wanted = math.ceil(round(rate * self.depths[-1], 9))
            return self._at(next(depth for depth in self.depths if depth >= wanted))
        cut = {group: kept_channels(full, rate) for group, full in self.groups.items()}
        return Architecture(tuple((cut | {"layers": list(self.heads_behind)[exit - 1]}).values()))

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return the cuts of these width rates, or of `depths` where there are some, largest first."""
        return [self._at(depth) for depth in reversed(self.depths)] if self.depths else super().candidates(widths)

    def first_layers(self, count: int) -> Architecture:
        """Return the encoder of the first `count` layers."""
        found = self._at(count)
        self.validate(found)
        return found

    def _at(self, depth: int) -> Architecture:
        return Architecture(tuple((self.groups | {"layers": depth}).values()))

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError that names the entry out of bounds and its bound."""
        if len(arch.widths) != len(self.groups) or arch.kernels:
            raise ValueError(f"encoder: an architecture has {', '.join(self.groups)}, not {arch}")
        for (group, full), kept in zip(self.groups.items(), arch.widths, strict=True):
            if not 1 <= kept <= full:
                raise ValueError(f"encoder: {group} must be 1 to {full}, not {kept}")
        if self.early_exits and arch.widths[-1] not in self.depths:
            raise ValueError(f"encoder: layers must be one of {list(self.depths)}, not {arch.widths[-1]}")

    def is_frozen(self, name: str) -> bool:
        """Say whether a tensor is not trained; of an adapter and of LoRA it is, unless they are named themselves.

        What they lie in does not freeze them.
        """
        for mark in ADDED:
            if mark in name:
                return any(mark in f"{part}." and lies_in(name, part) for part in self.freeze)
        return super().is_frozen(name)

    def network(self, arch: Architecture) -> Network:
        """Return the encoder of transformers with the head."""
        kept = dict(zip(self.groups, arch.widths, strict=True))
        heads = kept.get("heads", self.heads)
        hidden = heads * kept.get("head_channels", self.head_channels)
        return EncoderNetwork(self, hidden, heads, kept.get("mlp", self.mlp), kept["layers"])

    def coordinates(self, name: str, spec: TensorSpec) -> tuple[Coordinates, ...]:
        """Return the leading entries; of a dimension that is the channels of all heads, those of every head."""
        found = list(super().coordinates(name, spec))
        kind = KINDS[self.kind]
        # B's rows are those of the weights to which B A is added, so that the cut of the sum is the sum of the cuts.
        module = name.rpartition(".")[0].removesuffix(".lora_B")
        dimension = (
            0 if module.endswith(kind.rows) else 1 if module.endswith(kind.columns) and len(spec.shape) == 2 else None
        )
        if name.startswith(f"{kind.where}.") and dimension is not None and self.cut == "channels":
            kept = spec.shape[dimension] // self.heads
            if kept < self.head_channels:
                starts = torch.arange(self.heads).unsqueeze(1) * self.head_channels
                found[dimension] = (starts + torch.arange(kept)).flatten()
        return tuple(found)


class EncoderNetwork(Network):
    """Embeddings and layers of transformers under their own names, and a classifier.

    The encoder's pooler is left out: no head here reads it.
    """

    def __init__(self, family: Encoder, hidden: int, heads: int, mlp: int, layers: int) -> None:
        super().__init__([])
        with needed("transformers", "the family encoder"):  # not at a client's start: it takes seconds
            import transformers

        kind = KINDS[family.kind]
        cut = {"hidden": hidden, "depth": layers, "heads": heads, "mlp": mlp}
        sizes = {theirs: cut.get(ours, getattr(family, ours)) for ours, theirs in kind.sizes.items()}
        sizes[kind.attention_dropout] = family.attention_dropout
        config = getattr(transformers, f"{kind.model}Config")(
            **sizes, attn_implementation="sdpa", tie_word_embeddings=False
        )
        pooler = {"add_pooling_layer": False} if kind.has_types else {}
        body = getattr(transformers, f"{kind.model}Model")(config, **pooler)
        # Tables that follow from the shapes; as buffers they would have to be made anew wherever a model is.
        body.embeddings._buffers.clear()
        self.embeddings = body.embeddings
        self.where = kind.where
        self.add_module(self.where, getattr(body, self.where))
        query, _, value = kind.rows
        layers_of_body = list(self.get_submodule(f"{self.where}.layer").children())
        for layer in layers_of_body if family.adapter else ():
            for path in (kind.columns, kind.mlp_end):
                layer.set_submodule(path, Adapted(linear_at(layer, path), family.adapter))
        for layer in layers_of_body if family.lora else ():
            for path in (query, value):
                layer.set_submodule(path, LowRank(linear_at(layer, path), family.lora, family.lora_alpha))
        # The heads, by the number of layers in front; without early exits the one behind the last layer that is here.
        behind = family.heads_behind if family.early_exits else {layers: "classifier"}
        self.heads = {depth: head for depth, head in behind.items() if depth <= layers}
        for head in self.heads.values():
            self.add_module(head, Classifier(hidden, family.classes, family.dropout, dense=family.head == "dense"))
        self.pad_id, self.positions_from_tokens = family.pad_id, family.kind == "roberta"
        self.has_types = kind.has_types
        self.separator = family.pair_separator
        self.pooling = "none" if family.labels == "tokens" else family.pooling

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence) of int64 tokens -> (batch, classes), or (batch, classes, sequence) of every token.

        Only the deepest head is computed.
        """
        return self._said(x, list(self.heads)[-1:])[0]

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return what every head says, from the shallowest to the deepest; each as in `forward`."""
        return self._said(x, list(self.heads))

    def _said(self, x: Tensor, depths: list[int]) -> list[Tensor]:
        """Return what the heads behind these numbers of layers say."""
        real = x != self.pad_id
        positions = None  # which RoBERTa's embeddings count by themselves
        if not self.positions_from_tokens:
            positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        types = {"token_type_ids": self._types(x, real)} if self.has_types else {}
        hidden = self.embeddings(input_ids=x, position_ids=positions, **types)
        found = []
        for number, layer in enumerate(self.get_submodule(f"{self.where}.layer").children(), start=1):
            hidden = layer(hidden, real[:, None, None, :])
            if number in depths:
                found.append(self._read(self.get_submodule(self.heads[number]), hidden, real))
        return found

    def _types(self, x: Tensor, real: Tensor) -> Tensor:
        """1 where a token is of the second text of a pair or the separator behind it; padding is of type 0."""
        if self.separator < 0:
            return torch.zeros_like(x)
        ends = (x == self.separator).long()
        in_front = ends.cumsum(1) - ends
        return ((in_front == 1) & real).to(x.dtype)

    def _read(self, head: nn.Module, hidden: Tensor, real: Tensor) -> Tensor:
        """Return what a head says of (batch, sequence, hidden), where `real` tokens are no padding."""
        if self.pooling == "cls":
            hidden = hidden[:, 0]
        elif self.pooling == "mean":
            weight = real.unsqueeze(2).to(hidden.dtype)
            hidden = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        result: Tensor = head(hidden)
        return result.transpose(1, 2) if self.pooling == "none" else result


def _sizes_of(model: str) -> dict[str, Any]:
    """Return the sizes that a folder, or a model of the hub, has; ValueError if it is not one of `KINDS`."""
    with needed("transformers", "the family encoder"):
        from transformers import AutoConfig

    folder = Path(model).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else model)
    except (OSError, ValueError) as error:
        raise ValueError(f"encoder: no configuration of a model in {model}: {str(error).splitlines()[0]}") from None
    kind = config.model_type
    if kind not in KINDS:
        raise ValueError(
            f"encoder: {model} is of kind {kind!r}, and there are {', '.join(KINDS)}; {nearest_part(kind, KINDS)}"
        )
    sizes = {field: getattr(config, name) for field, name in KINDS[kind].sizes.items()}
    if not isinstance(sizes["activation"], str):
        raise ValueError(f"encoder: the activation of {model} is {sizes['activation']!r}, not a name")
    return {"kind": kind, **sizes}
