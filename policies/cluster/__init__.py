"""Which worker takes a request, where adapters are kept, and which requests move: decisions over all workers."""
