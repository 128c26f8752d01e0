"""Flower's log, which is this project's as well; without importing Flower."""

import logging

log = logging.getLogger("flwr")
