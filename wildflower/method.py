"""All that the author of a method imports: `from wildflower.method import ...` (docs/extending.md, docs/recipes.md)."""

from pydantic import Field
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.weights import with_weights
from wildflower.strategies.channels import channel_norms, strongest
from wildflower.strategies.contract_values import (
    LEADING,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    State,
    Trained,
)
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.strategies.heterofl import HeteroFL
from wildflower.strategies.local import LocalOnly, TrainingAlone
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Method, Training, Traits
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Count, CountOrZero, Decay, Fraction, Numbers, Params, PositiveRate, Rate
from wildflower.strategies.pricing import fits
from wildflower.strategies.shared_losses import Loss, Regularizer, divergence
from wildflower.strategies.static_norm import StaticNormMethod
from wildflower.strategies.submodel import CandidateMethod, SubModelMethod

__all__ = [
    "LEADING",
    "Answer",
    "Architecture",
    "Budget",
    "CandidateMethod",
    "ClientContext",
    "ClientStep",
    "Contribution",
    "Cost",
    "Count",
    "CountOrZero",
    "Decay",
    "Family",
    "FedAvg",
    "FedAvgParams",
    "Field",
    "Fraction",
    "Group",
    "HeteroFL",
    "LocalOnly",
    "Loss",
    "Merge",
    "Method",
    "Model",
    "Network",
    "Numbers",
    "OneArchitecture",
    "Order",
    "Params",
    "PositiveRate",
    "Rate",
    "Regularizer",
    "Selection",
    "Setup",
    "State",
    "StaticNormMethod",
    "SubModelMethod",
    "TensorSet",
    "TensorSets",
    "TensorSpec",
    "Trained",
    "Training",
    "TrainingAlone",
    "Traits",
    "Weights",
    "channel_norms",
    "divergence",
    "fits",
    "override",
    "strongest",
    "with_weights",
]
