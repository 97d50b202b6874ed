"""Weights of a small autoregressive talker; data only. See README.md and NOTICE of the package."""
