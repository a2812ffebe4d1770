"""Clients of a running stack, and a model to try it with."""
