"""Before round 1: whether the two halves of a method agree about what travels, on the smallest architecture."""

from __future__ import annotations

from wildflower.messages.error import MessageError
from wildflower.messages.orders import MAX_BESIDE
from wildflower.messages.packing import Layout
from wildflower.messages.tensor_sets import STATISTICS, TensorSet, Weights, digest
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.plugins.draws import same_chance
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.client_step import tensor_sets_of
from wildflower.strategies.method import ClientStep, Group, Method, Order, client_step_of


class DryRunError(ValueError):
    """The halves of a method do not go together; the text says what differs."""


def dry_run_tensor_sets(method: Method) -> None:
    """Raise DryRunError unless a method's client step can travel, and lists tensor sets as both sides derive them."""
    order = Order(0, method.smallest_architecture)
    local = method.client_step(order)
    if not isinstance(local, ClientStep):
        raise DryRunError(
            f"lacks a client step: `local` returns {local!r}, and must return a value of a class of "
            "wildflower.strategies.method.ClientStep"
        )
    name = local.reference().name
    with raised_as(DryRunError, f"its client step {name} cannot travel: ", (MessageError, ValueError)):
        there = client_step_of(type(local.reference()).model_validate_json(local.reference().model_dump_json()))
    beside = local.scored_beside
    if len(set(beside)) != len(beside) or len(beside) > MAX_BESIDE or not all(isinstance(n, str) and n for n in beside):
        raise DryRunError(
            f"`scored_beside` of {name} must be at most {MAX_BESIDE} different names of networks, not {beside!r}"
        )
    mine, theirs = (tensor_sets_of(half, method.family, order.architecture) for half in (local, there))
    for function, tensor_sets in zip(("sent", "returned"), mine, strict=True):
        if not isinstance(tensor_sets, dict) or not all(
            isinstance(tensor_set, TensorSet) for tensor_set in tensor_sets.values()
        ):
            raise DryRunError(f"`{function}` of {name} must return tensor sets by name, not {tensor_sets!r}")
    if digest(*mine) != digest(*theirs):
        raise DryRunError(f"server and device derive other tensor sets of {name} from the same settings {there!r}")
    try:
        method.family.place(order.architecture, method.selection(order.device, order.architecture).select)
    except ValueError as error:
        raise DryRunError(str(error)) from error
    if any(tensor_set.merge and tensor_set.merge.present_classes for tensor_set in mine[1].values()):
        _tell_of_classes(method.family, order.architecture)


def _tell_of_classes(family: Family, architecture: Architecture) -> None:
    """Warn of a model of which no learned tensor has an entry for each class."""
    tensors, network = family.tensors(architecture), family.without_memory(architecture)
    learned = tensors.keys() & {name for name, _ in network.named_parameters()}
    if learned and not any(tensors[name].of_classes for name in learned):
        log.warning(
            "No tensor of the model counts the classes one by one: what devices without a class return counts for it "
            "as well. A head such as nn.Linear(channels, classes) at the end has such a tensor"
        )


def dry_run_payload(method: Method) -> None:
    """Raise DryRunError unless a method's payload holds the tensor sets and tensors that its client step expects."""
    order = Order(0, method.smallest_architecture)
    local = method.client_step(order)
    sent, returned = tensor_sets_of(local, method.family, order.architecture)
    if not sent:
        return
    selection = method.selection(order.device, order.architecture)
    placement = method.family.place(order.architecture, selection.select)
    with same_chance():
        contents = method.payload(Group(order.architecture, selection, sent, returned, placement))
    name = local.reference().name
    if contents.keys() != sent.keys():
        raise DryRunError(
            f"`payload` holds the tensor sets {sorted(contents)}, and `sent` of {name} lists {sorted(sent)}"
        )
    for tensor_set, tensors in contents.items():
        layout = sent[tensor_set].layout
        if difference := layout.difference(Layout.of(without_unlisted_frozen(tensors, layout, method.family))):
            raise DryRunError(
                f"the tensor set {tensor_set!r} of `payload` is not the one that `sent` of {name} lists: {difference}"
            )


def without_unlisted_frozen(tensors: Weights, layout: Layout, family: Family) -> Weights:
    """A tensor set's tensors as they travel: what is frozen stays behind, unless the tensor set's layout lists it."""
    listed = {entry.name for entry in layout.entries}
    return {name: tensor for name, tensor in tensors.items() if name in listed or not family.is_frozen(name)}


def dry_run_privacy(method: Method) -> None:
    """Raise DryRunError where a differentially private run's devices would tell what no noise is added to."""
    if method.settings.privacy is None:
        return
    told = []
    for returned in _returned(method):
        if len(returned) != 1 or any(tensor_set.merge is None for tensor_set in returned.values()):
            told.append(f"the tensor sets {sorted(returned)} in place of one that is added up")
    told += _told_beside(method)
    families = [method.family, *(model.family for model in method.models([method.scored_architecture]).values())]
    if any(name.endswith(STATISTICS) for f in families for name in f.tensors(method.scored_architecture)):
        told.append(
            "batch norm's statistics (a family without batch norm has none, and in fedavg and its kin those with "
            "family-arguments = \"norm = 'static'\")"
        )
    if told:
        raise DryRunError(
            f"differential privacy (dp.epsilon, dp.noise-multiplier) adds noise to the mean of devices' changes, and "
            f"under {method.name()} devices also return {told[0]}: see docs/privacy.md"
        )


def dry_run_secure(method: Method) -> None:
    """Raise DryRunError where devices would tell more than sums of what they return."""
    if not method.settings.secure_minimum:
        return
    every = [item for returned in _returned(method) for item in returned.items()]
    told = [f"the tensor set {name!r} by itself" for name, tensor_set in every if tensor_set.merge is None]
    told += _told_beside(method)
    for model in method.models([method.scored_architecture]).values():
        names = model.family.tensors(model.architecture)
        if any(name.endswith(STATISTICS) and name not in model.weights for name in names):
            told.append("batch norm's statistics, which they take after training")
    if told:
        raise DryRunError(
            f"secure-aggregation lets the server see sums only, and under {method.name()} every device returns "
            f"{told[0]}: see docs/secure-aggregation.md"
        )


def _returned(method: Method) -> list[dict[str, TensorSet]]:
    """The tensor sets that devices return of the smallest and of the largest model."""
    both = dict.fromkeys([method.smallest_architecture, method.scored_architecture])
    return [tensor_sets_of(method.client_step(Order(0, a)), method.family, a)[1] for a in both]


def _told_beside(method: Method) -> list[str]:
    """What devices tell beside tensor sets, each by itself."""
    both = (method.smallest_architecture, method.scored_architecture)
    names = dict.fromkeys(name for a in both for name in method.client_step(Order(0, a)).facts(method.family))
    told = [f"the fact {name!r}" for name in names]
    if method.first_question is not None:
        told.append("an answer to its first question")
    if method.scored_on_devices() is not None:
        told.append("scores of models of their own")
    return told
