"""Actors: what models are made of. May import torch."""
