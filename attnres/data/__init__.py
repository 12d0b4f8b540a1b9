"""Corpora, tokenizers, packed token files and the sampler. Torch-free: numpy only."""
