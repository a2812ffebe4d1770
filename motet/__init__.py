"""The `motet` command: starts services, supervises a local stack, and talks to a running one."""
