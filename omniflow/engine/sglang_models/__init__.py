"""Models that SGLang runs for omniflow: registered as a package of its `ModelRegistry`."""
