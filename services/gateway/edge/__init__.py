"""The HTTP side: connections, routes, bodies in, answers and events out."""
