"""Clients of any OpenAI-compatible server: what `omniflow chat`, `say`, `transcribe` and `bench serve` are made of."""
