"""The command line, and the local stack that it starts and supervises."""
