"""Durable requests: taken from a stream of the bus and answered there."""
