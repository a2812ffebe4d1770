"""Plans how many workers a set of adapters needs. The law proposes (`policies.plan`), the twin has the last word.

Read `loads` (adapters and their load), `adapter_list` (a file of them), `kinds` (workers that can be had), `check` (a plan
simulated) and `planner` (the loop).
"""
