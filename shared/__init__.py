"""What every service speaks: domain types, messages, the bus, configuration, errors, telemetry and the clock."""
