"""Language models: the interface, the exact table model, and transformers."""
