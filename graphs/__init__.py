"""Graphs: one file a model system, declarations only."""
