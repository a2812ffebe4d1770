"""The `motet` command: starts services, supervises the local stack, and talks to a running one."""
