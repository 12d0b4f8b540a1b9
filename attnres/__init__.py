"""How one trial runs: configuration, model, residual rules, data, training, record."""
