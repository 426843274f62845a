"""Diffusion models that draft for an autoregressive target (DEER, arXiv 2512.15176)."""
