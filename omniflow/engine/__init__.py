"""AR engines behind one protocol (`base.Engine`): `transformers` for CPUs and for parity, `sglang` for GPUs."""
