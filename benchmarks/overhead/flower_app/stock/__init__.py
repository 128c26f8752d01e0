"""Flower's own FedAvg, as its documentation writes an app; `workload` is shared with the loops without Flower."""
