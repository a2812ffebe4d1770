"""Code that all services share: domain types, messages, the bus, configuration, errors, telemetry and the clock."""
