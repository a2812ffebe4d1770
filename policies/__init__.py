"""Motet's decisions as pure synchronous code: state in, actions out.

A policy is a function or a small state object that imports nothing of ours but `shared.model`: no asyncio, nats, torch, clock
or global random. Time comes in as `now_s` (seconds on the caller's clock) and chance as a seeded generator. So the live
services and the simulator run the same code, and a logged decision can be replayed.

Choosing a worker, in reading order: `perf_model` (step times), `step_times` and `perf_fit` (fitting them, online and
offline), `worker_load` and `cluster_state` (the workers' state), `flights` (assignments that no state shows yet), `candidates`
(workers that can take a request), `choice` (a policy's answer), `shared_cost`, `rank_aware` and `baselines` (the policies),
`dispatch` (the whole decision), `length_quantiles` (expected output length). Inside a worker: `batch_state` (sequences and
plans), `batch_admission` (what the next step computes), `kv_blocks` and `adapter_slots` (memory), `step_record` (a step in
numbers), `merge_decision` (when an adapter is merged into the weights). Between workers: `placement` (which adapters
each worker keeps loaded), `migration_plan` (requests that move to another worker).
"""
