"""Messages between Motet's services: msgspec structs in msgpack, data only.

Fields are only ever added, with defaults, and a reader ignores fields that it does not know, so services of two versions
understand each other during a rolling restart. Frequent messages are array-like. Messages of other systems are JSON; their
schemas are in docs/nats.
"""
