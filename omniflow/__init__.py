"""omniflow: omni-modal models as a typed dataflow graph of supervised actors."""
