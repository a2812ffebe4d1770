"""Motet's image engine: Stable Diffusion models, with requests of different adapters and step counts in one denoising batch."""
