"""Methods: one file each, with both halves; `strategies.method` is their contract.

`METHODS` holds each method's server half by the name that the run configuration uses.
"""

from __future__ import annotations

from strategies.anycostfl import AnycostFL
from strategies.depthfl import DepthFL
from strategies.fedadam import FedAdam
from strategies.fedavg import FedAvg
from strategies.fedavgm import FedAvgM
from strategies.feddf import FedDF
from strategies.federated_dropout import FederatedDropout
from strategies.fednas import FedNAS
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.fedrolex import FedRolex
from strategies.fjord import FjORD
from strategies.flexifed import FlexiFed
from strategies.heterofl import HeteroFL
from strategies.hypemefed import HypeMeFed
from strategies.inclusivefl import InclusiveFL
from strategies.local import LocalOnly
from strategies.lotteryfl import LotteryFL
from strategies.method import Method
from strategies.model_search import ModelSearch
from strategies.q_fedavg import QFedAvg
from strategies.rafl import RaFL
from strategies.recipfl import RecipFL
from strategies.scaffold import Scaffold
from strategies.scalefl import ScaleFL
from strategies.spatl import Spatl
from strategies.wildflower import Wildflower

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
