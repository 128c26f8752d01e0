"""Families of models, placements of sub-models in them, and their cost. No Flower in here."""
