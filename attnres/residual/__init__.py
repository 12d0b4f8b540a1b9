"""Residual rules: what each sublayer reads. `specs` is torch-free, the modules are in files by family."""
