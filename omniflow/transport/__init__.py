"""How values travel between hosts: one class a transport, one contract suite for all (tests/contract)."""
