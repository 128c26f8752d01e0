"""Methods: one file each, with both halves; `wildflower.strategies.method` is their contract.

`METHODS` holds each method's server half by the name that the run configuration uses.
"""

from __future__ import annotations

from wildflower.strategies.anycostfl import AnycostFL
from wildflower.strategies.depthfl import DepthFL
from wildflower.strategies.fedadam import FedAdam
from wildflower.strategies.fedavg import FedAvg
from wildflower.strategies.fedavgm import FedAvgM
from wildflower.strategies.feddf import FedDF
from wildflower.strategies.federated_dropout import FederatedDropout
from wildflower.strategies.fednas import FedNAS
from wildflower.strategies.fednova import FedNova
from wildflower.strategies.fedprox import FedProx
from wildflower.strategies.fedrolex import FedRolex
from wildflower.strategies.fjord import FjORD
from wildflower.strategies.flexifed import FlexiFed
from wildflower.strategies.heterofl import HeteroFL
from wildflower.strategies.hypemefed import HypeMeFed
from wildflower.strategies.inclusivefl import InclusiveFL
from wildflower.strategies.local import LocalOnly
from wildflower.strategies.lotteryfl import LotteryFL
from wildflower.strategies.method import Method
from wildflower.strategies.model_search import ModelSearch
from wildflower.strategies.q_fedavg import QFedAvg
from wildflower.strategies.rafl import RaFL
from wildflower.strategies.recipfl import RecipFL
from wildflower.strategies.scaffold import Scaffold
from wildflower.strategies.scalefl import ScaleFL
from wildflower.strategies.spatl import Spatl
from wildflower.strategies.wildflower import Wildflower

METHODS: dict[str, type[Method]] = {
    kind.name(): kind
    for kind in (
        FedAvg,
        LocalOnly,
        FedAdam,
        FedProx,
        FedAvgM,
        FedNova,
        Scaffold,
        QFedAvg,
        HeteroFL,
        FedRolex,
        FederatedDropout,
        FjORD,
        AnycostFL,
        ModelSearch,
        HypeMeFed,
        DepthFL,
        ScaleFL,
        InclusiveFL,
        FlexiFed,
        LotteryFL,
        RaFL,
        FedDF,
        Spatl,
        FedNAS,
        Wildflower,
        RecipFL,
    )
}

DEFAULT_METHOD = HeteroFL.name()  # of a run whose configuration says none

__all__ = ["DEFAULT_METHOD", "METHODS"]
