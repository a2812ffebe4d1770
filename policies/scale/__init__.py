"""How many workers a base model should have: its rates ahead, its size, and homes of adapters on live workers."""
