"""What the next engine step computes: queues, admission, cold starts, merged adapters."""
