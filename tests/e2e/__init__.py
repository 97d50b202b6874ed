"""The product as a user meets it: `omniflow run` as a process, driven by real clients."""
