"""ROCK's evaluation (section 6.1) as a simulation: 64 GPUs, 200 adapters, a recorded or a drawn trace.

- `jobs`: the requests, from the recorded trace or drawn.
- `machines`: the GPUs (speeds, memory, which base model each has), and how long loads take.
- `fleet`: the events (requests queue, adapters load, batches run), and what a system consists of.
- `dispatches`: which node gets a request, by ROCK's rivals and Motet. `queues`: by ROCK, with the patterns in `watched`.
- `placements`: which adapters are loaded ahead of requests.
- `systems`: the compositions that are compared. `measure`: one run and its figures.
"""
