"""Ming's thinker for SGLang: registered as a package of its `ModelRegistry`."""
