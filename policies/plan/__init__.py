"""How many workers a set of adapters needs: the law of a worker (`capacity`), packing, and a lower bound."""
