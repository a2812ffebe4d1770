"""Everything that owns a byte of a worker: KV blocks, adapter slots, the host tier, and who gives way."""
