"""Trainings of several devices at once: weights stacked, one optimizer over the stack, every row on its device's data.

A row's numbers are those of its training alone, but for rounding. A device with fewer steps leaves the stack when it is
done. Batches of unequal sizes are padded with examples of weight 0 where losses and norms can be weighted; else those
of one size are computed at once. No model is changed before all are trained, so that whatever goes wrong before can be
done in turn instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from wildflower.client_app.batches import micro_batches
from wildflower.client_app.chance import draws
from wildflower.client_app.fitting import Fit, optimizer_of
from wildflower.client_app.row_layers import RowLayers, takes_rows
from wildflower.client_app.stack_checks import (
    aliases,
    are_constant,
    are_equal,
    check_modules,
    check_shapes,
    check_trainings,
    plain_attributes,
    takes_padding,
)
from wildflower.client_app.stack_layers import Computed, for_rows
from wildflower.client_app.stack_operators import InTurn
from wildflower.client_app.widths import can_be_filled, filled, own, rates
from wildflower.models.network import Network
from wildflower.models.weights import trained_parameters
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.scoring import Scored, Scoring, add_up, score_outputs


class RowError(Exception):
    """One of the trainings cannot be done, for `error`; `row` is its place."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__()
        self.row, self.error = row, error


def fit_stacked(fits: Sequence[Fit], drawn: Sequence[Tensor]) -> tuple[list[float], list[Tensor]]:
    """Train models of one client step at once, in place, and return their mean losses.

    Args:
        fits: those of devices with more examples first. Their models are of one architecture, or `can_be_filled`.
        drawn: for each the state of the generator that dropout draws from; that of afterwards is returned.

    Raises:
        InTurn: they cannot be trained so. No model has changed.
        RowError: the data of one of them cannot be had. No model has changed.
    """
    rows = _Rows(fits, drawn)
    with rows.layers or for_rows(rows.loss, rows.now):
        losses = rows.train()
    rows.write_back()
    return losses, [generator.get_state() for generator in rows.now.generators]


@torch.no_grad()
def score_stacked(scorings: Sequence[Scoring]) -> list[Scored]:
    """Score models of one architecture at once, each on examples of its own.

    Raises:
        InTurn: they cannot be scored so.
        RowError: the data of one of them cannot be had.
    """
    first = scorings[0]
    for each in scorings:
        each.model.to(each.device).eval()
    tables = [dict(each.model.named_parameters()) | dict(each.model.named_buffers()) for each in scorings]
    check_shapes(tables, "the models")
    models = [each.model for each in scorings]
    check_modules(models, models, "the models")
    found_tensors = {name: [table[name] for table in tables] for name in tables[0]}
    shared = {name: each[0].clone() for name, each in found_tensors.items() if are_constant(each)}
    stacked = {name: torch.stack(each) for name, each in found_tensors.items() if name not in shared}
    tied = aliases(first.model)

    def compute(tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        found = {**tensors, **shared}
        found |= {name: found[known] for name, known in tied.items()}
        outputs: Tensor = functional_call(first.model, found, (inputs,), tie_weights=False)
        return outputs

    pads = takes_padding(first.model)
    found: list[list[Scored]] = [[] for _ in scorings]
    for start in range(0, max(each.examples for each in scorings), first.batch_size):
        batches = {
            row: _of_row(row, partial(each.batch, start)) for row, each in enumerate(scorings) if start < each.examples
        }
        alike: dict[Any, list[int]] = {}
        for row, (inputs, _) in batches.items():
            alike.setdefault((0 if pads else len(inputs), inputs.shape[1:]), []).append(row)
        for rows in alike.values():
            tensors = stacked if len(rows) == len(scorings) else {n: value[rows] for n, value in stacked.items()}
            with for_rows(first.model, None):
                outputs = vmap(compute)(tensors, _padded([batches[row][0] for row in rows]))
            if any(value._version for value in (*tensors.values(), *shared.values())):
                raise InTurn("its model changes its tensors while it is scored")
            for row, of_row in zip(rows, outputs, strict=True):
                labels = batches[row][1]
                found[row].append(score_outputs(scorings[row].task, of_row[: len(labels)], labels))
    return [add_up(each.task, batches) for each, batches in zip(scorings, found, strict=True)]


class _Rows:
    """The stack: row k is the k-th training, those with the most steps first."""

    def __init__(self, fits: Sequence[Fit], drawn: Sequence[Tensor]) -> None:
        losses = [_pure(fit) for fit in fits]
        self.fits, self.first, self.loss = fits, fits[0], losses[0]
        if not all(loss.task.asks_the_same(self.loss.task) for loss in losses):
            raise InTurn("devices have tasks of their own")
        if any((fit.training, fit.rate) != (self.first.training, self.first.rate) for fit in fits):
            raise InTurn("devices are trained at different rates")
        if any(fit.new_statistics for fit in fits):
            raise InTurn("batch norm's statistics begin as a mean over the first batches")
        # Of a network that is not of described layers nobody knows what it computes over all examples of a batch.
        self.weighs = type(self.first.model) is Network and self.loss.sums_examples
        self.now = Computed([torch.Generator(self.first.device).set_state(state) for state in drawn])
        by_layer = self.weighs and all(map(takes_rows, (self.loss.outputs, *self.loss.more)))
        tables = [dict(loss.named_parameters()) | dict(loss.named_buffers()) for loss in losses]
        unequal = by_layer and any(_shapes(each) != _shapes(tables[0]) for each in tables) and can_be_filled(losses)
        if not unequal:
            check_shapes(tables, "the losses")
        self.tied = aliases(self.loss)
        places = {id(parameter): name for name, parameter in self.loss.named_parameters()}
        parameters = trained_parameters(self.first.model)
        if hidden := [name for name, each in parameters.items() if id(each) not in places]:
            raise InTurn(f"its loss has no parameter that is the model's {hidden[0]}")
        check_trainings(losses, [fit.model for fit in fits], self.first.training.layout)
        # As the model names them -> as the loss does.
        self.names = {name: places[id(each)] for name, each in parameters.items()}
        self.layers = RowLayers(self.loss, self.names) if by_layer else None
        frozen = {places[id(each)] for each in self.first.model.parameters() if not each.requires_grad}
        self.trained: dict[str, nn.Parameter] = {}
        self.shared: dict[str, Tensor] = {}
        self.beside: dict[str, Tensor] = {}
        for name in tables[0]:
            found = [table[name].detach() for table in tables]
            if name in self.names.values():
                self.trained[name] = nn.Parameter(filled(found))
            elif name in frozen and all(are_equal(found[0], each) for each in found[1:]):
                self.shared[name] = found[0]
            elif are_constant(found):
                self.shared[name] = found[0].clone()  # which the model may change, until that is found out
            else:
                self.beside[name] = filled(found)
        if not self.trained:
            raise InTurn("nothing of its model is trained")
        self.dtype = next(iter(self.trained.values())).dtype
        # Those that are done stay in these, while the parameters that are stepped become views of the first rows.
        self.whole = {name: value.data for name, value in self.trained.items()} | self.beside
        if unequal:
            self.beside |= {name: of_rows.to(self.first.device) for name, of_rows in rates(losses).items()}
        self.optimizer = optimizer_of(
            {name: self.trained[inner] for name, inner in self.names.items()},
            self.first.training,
            self.first.device,
            self.first.rate,
        )
        self.regularize = self._regularizing()
        if any(fit.factors.keys() != self.first.factors.keys() for fit in fits):
            raise InTurn("devices have factors of gradients for different parameters")
        for name in self.names.keys() & self.first.factors:
            factors = [fit.factors[name] for fit in fits]
            alike = all(torch.equal(factors[0], each) for each in factors)
            rows = factors[0].unsqueeze(0) if alike else filled(factors)
            self.trained[self.names[name]].register_hook(partial(_times, rows))

    # The loop

    def train(self) -> list[float]:
        """Train all rows, and return their mean losses."""
        batches = [fit.start() for fit in self.fits]
        totals = torch.zeros(len(self.fits), dtype=torch.float64, device=self.first.device)
        seen = [0] * len(self.fits)
        drawn, attributes = draws(self.first.device), plain_attributes(self.loss)
        versions = [value._version for value in self.shared.values()]
        for step in range(2**62):
            picked = [_of_row(row, partial(next, each, None)) for row, each in enumerate(batches)]
            going = [examples for examples in picked if examples is not None]
            if any(examples is None for examples in picked[: len(going)]):
                raise InTurn("a device with more examples takes fewer steps")
            if not going:
                break
            if len(going) < len(batches):
                self._narrow(len(going))
                del batches[len(going) :]
            self.optimizer.zero_grad(set_to_none=True)
            beside = None if self.regularize is None else self.regularize()
            parts = [micro_batches(examples, self.first.training.examples_at_once) for examples in going]
            counts = [sum(map(len, of_row)) for of_row in parts]
            values = self._add_gradients(parts, counts)
            if step == 0 and not torch.equal(drawn, draws(self.first.device)):
                raise InTurn("the model or its loss draws at random")
            if step == 0 and plain_attributes(self.loss) != attributes:
                raise InTurn("its model keeps more than tensors from one batch to the next")
            if [value._version for value in self.shared.values()] != versions:
                raise InTurn("its model changes what devices have alike")
            if beside is not None:
                values = values + beside
            if self.first.training.clip_norm:
                self._clip(self.first.training.clip_norm)
            self.optimizer.step()
            totals[: len(going)] += values * torch.tensor(counts, device=values.device)
            for row, count in enumerate(counts):
                seen[row] += count
        return [total / max(1, examples) for total, examples in zip(totals.tolist(), seen, strict=True)]

    def _add_gradients(self, parts: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> Tensor:
        """Add the gradients of the batches' mean losses, and return these, one per row."""
        values = torch.zeros(len(parts), dtype=torch.float64, device=self.first.device)
        for place in range(max(map(len, parts))):
            having = [row for row, of_row in enumerate(parts) if place < len(of_row)]
            examples = self._examples({row: parts[row][place] for row in having})
            for rows, term in itertools.product(self._at_once(examples), range(self.loss.terms)):
                losses = self._losses(rows, [examples[row] for row in rows], [counts[row] for row in rows], term)
                losses.sum().backward()
                values = values.index_add(0, torch.tensor(rows, device=values.device), losses.detach().to(values.dtype))
        return values

    def _examples(self, picked: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the rows' inputs and labels, those of one data set taken at once, which is far less work."""
        of_data: dict[Hashable, list[int]] = {}
        for row in picked:
            of_data.setdefault(self.fits[row].data, []).append(row)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for data, rows in of_data.items():
            if data is not None and len(rows) > 1:
                inputs, labels = self.fits[rows[0]].examples_of(torch.cat([picked[row] for row in rows]))
                sizes = [len(picked[row]) for row in rows]
                found |= zip(rows, zip(inputs.split(sizes), labels.split(sizes), strict=True), strict=True)
            else:
                found |= {row: _of_row(row, partial(self.fits[row].examples_of, picked[row])) for row in rows}
        return found

    def _at_once(self, examples: Mapping[int, tuple[Tensor, Tensor]]) -> Iterable[list[int]]:
        """Return which rows' batches are computed at once."""
        found: dict[Any, list[int]] = {}
        for row, (inputs, labels) in examples.items():
            # A norm may refuse a single example.
            size = len(inputs) if len(inputs) == 1 or not self.weighs else 0
            found.setdefault((size, inputs.shape[1:], labels.shape[1:]), []).append(row)
        return found.values()

    def _losses(self, rows: list[int], batches: list[tuple[Tensor, Tensor]], counts: list[int], term: int) -> Tensor:
        """Return the rows' parts of a term of their mean losses.

        counts: the examples of the whole batches, of which these may be parts.
        """
        sizes = [len(inputs) for inputs, _ in batches]
        self.now.rows, self.now.sizes = rows, sizes
        inputs, labels = ([batch[side] for batch in batches] for side in (0, 1))
        trained: Mapping[str, Tensor] = self.trained
        beside, at = self.beside, None
        if len(rows) < len(next(iter(self.trained.values()))):
            at = torch.tensor(rows, device=self.first.device)
            trained = {name: value[at] for name, value in trained.items()}
            beside = {name: value[at] for name, value in beside.items()}
        weights = None
        if len(set(sizes)) > 1:
            of_rows = [torch.full((size,), 1 / n, dtype=self.dtype) for size, n in zip(sizes, counts, strict=True)]
            weights = _padded(of_rows).to(self.first.device)
        by_vmap = vmap(partial(self._loss, term), in_dims=(0, 0, 0, 0, None if weights is None else 0))
        compute = by_vmap if self.layers is None else partial(self._losses_by_layer, self.layers, term)
        try:
            losses: Tensor = compute(trained, beside, _padded(inputs), _padded(labels), weights)
        except RuntimeError as error:
            if "random operation" in str(error):
                raise InTurn("the model or its loss draws at random, other than by nn.Dropout") from error
            raise
        if at is not None:
            if any(value._version for value in trained.values()):
                raise InTurn("its model changes its weights while it computes")
            for name, value in beside.items():
                self.beside[name][at] = value
        if weights is None and sizes != counts:
            losses = losses * torch.tensor([s / n for s, n in zip(sizes, counts, strict=True)], device=losses.device)
        return losses

    def _loss(
        self,
        term: int,
        trained: Mapping[str, Tensor],
        beside: Mapping[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        self.now.weights = weights
        tensors = {**trained, **beside, **self.shared}
        tensors |= {name: tensors[known] for name, known in self.tied.items()}
        given = tensors.copy()  # of which the call puts in others where the module does
        found: Tensor = functional_call(self.loss, tensors, (inputs, labels, weights, term), tie_weights=False)
        if any(tensors[name] is not value for name, value in given.items()):
            raise InTurn("its model puts other tensors in the place of its own")
        return found

    def _losses_by_layer(
        self,
        layers: RowLayers,
        term: int,
        trained: Mapping[str, Tensor],
        beside: Mapping[str, Tensor],
        inputs: Tensor,
        labels: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        shared = {name: value.expand(len(inputs), *value.shape) for name, value in self.shared.items()}
        network = self.loss.more[term - 1] if term else self.loss.outputs
        outputs = layers.outputs(network, {**trained, **beside, **shared}, inputs, weights)
        of_examples = self.loss.task.losses(outputs.flatten(0, 1), labels.flatten(0, 1)).view(len(inputs), -1)
        losses = of_examples.mean(1) if weights is None else (of_examples * weights).sum(1)
        return losses / self.loss.terms

    # What a step does beside

    def _narrow(self, count: int) -> None:
        """Leave all but the first rows as they are from now on."""
        for parameter in self.trained.values():
            parameter.data = parameter.data[:count]
            parameter.grad = None
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():  # not the number of steps
                    state[key] = value[:count]
        self.beside = {name: value[:count] for name, value in self.beside.items()}

    def _clip(self, most: float) -> None:
        """Scale each row's gradients to at most this norm, as `nn.utils.clip_grad_norm_` does."""
        gradients = [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]
        norms = torch.stack([_squares(each) for each in gradients]).sum(0).sqrt()
        scales = (most / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scales.view(-1, *[1] * (gradient.dim() - 1)))

    def _regularizing(self) -> Callable[[], Tensor | None] | None:
        """Return what sets gradients to those of the rows' regularizers, as `wildflower.client_app.fitting` does."""
        found = [fit.regularizer for fit in self.fits if fit.regularizer is not None]
        if not found:
            return None
        kinds = {(each.strength, each.reported, each.toward is None, *each.correction) for each in found}
        if len(found) < len(self.fits) or len(kinds) > 1:
            raise InTurn("devices are regularized differently")
        strength, reported = found[0].strength, found[0].reported
        received: dict[str, Tensor] = {}
        corrections: dict[str, Tensor] = {}
        for name, inner in self.names.items():
            if strength:
                towards = [None if each.toward is None else each.toward[name] for each in found]
                whole = self.whole[inner]
                received[inner] = whole.clone() if None in towards else filled(towards).to(whole)  # type: ignore
            if name in found[0].correction:
                corrections[inner] = filled([each.correction[name] for each in found]).to(self.first.device)

        def regularize() -> Tensor | None:
            distances = []
            for name, parameter in self.trained.items():
                count = len(parameter)
                if received:
                    moved = parameter.detach() - received[name][:count]
                    if reported:
                        distances.append(_squares(moved))
                    parameter.grad = moved.mul_(strength)
                    if name in corrections:
                        parameter.grad -= corrections[name][:count]
                elif name in corrections:
                    parameter.grad = corrections[name][:count].neg()
            return strength / 2 * torch.stack(distances).sum(0) if distances else None

        return regularize

    def write_back(self) -> None:
        """Give every model its row."""
        for row, fit in enumerate(self.fits):
            table = dict(fit.loss.named_parameters()) | dict(fit.loss.named_buffers())  # type: ignore[attr-defined]
            for name, value in self.whole.items():
                table[name].detach().copy_(own(value[row], table[name]))


def _pure(fit: Fit) -> PureLoss:
    if not isinstance(fit.loss, PureLoss):
        raise InTurn("its loss is no PureLoss (wildflower.strategies.shared_losses)")
    fit.model.train()
    return fit.loss


def _shapes(table: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in table.items()}


def _squares(rows: Tensor) -> Tensor:
    """Return each row's sum of squares."""
    return rows.reshape(len(rows), -1).square().sum(1)


def _times(factors: Tensor, gradient: Tensor) -> Tensor:
    return gradient * factors[: len(gradient)].to(gradient.dtype)


def _of_row(row: int, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise RowError(row, error) from error


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose first sides may differ, with zeros behind the shorter ones."""
    return pad_sequence(list(rows), batch_first=True)
