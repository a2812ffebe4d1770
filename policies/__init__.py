"""Every decision Motet makes, as pure synchronous code: state in, actions out.

The room's rule: a policy is a function or a small state object that imports nothing of ours but `shared.model` - no
asyncio, nats, torch, clock or global random. Time comes in as `now_s` (seconds on the caller's clock) and chance as a
seeded generator, so the live services and the simulator run the very same code, and a logged decision can be replayed.

Choosing a worker, in reading order: `perf_model` (what a step costs) and `perf_fit` (measuring that), `worker_load` and
`cluster_state` (what is known of the workers), `flights` (what is promised and not yet shown), `candidates` (who may take a
request), `choice` (what a policy answers), `shared_cost`, `rank_aware` and `baselines` (the policies), `dispatch` (the whole
decision), `length_quantiles` (how long it will be). Inside a worker: `batch_admission` (what the next step computes),
`kv_blocks` and `adapter_slots` (what memory holds).
"""
