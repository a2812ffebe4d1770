"""Motet's decisions as pure synchronous code: state in, actions out.

A policy is a function or a small state object that imports nothing of ours but `shared.model`: no asyncio, nats, torch, clock
or global random. Time comes in as `now_s` (seconds on the caller's clock) and chance as a seeded generator. So the live
services and the simulator run the same code, and a logged decision can be replayed.

The rooms, each with its modules in reading order. A room imports only rooms that come before it; memory and plan
do not know each other, nor do cluster and step, and lengths stands alone.

- `times`: `perf_model` (step times), `step_record` (a step in numbers), `step_times` and `perf_fit` (fitting them, online and
  offline)
- `memory`: `kv_blocks` and `adapter_slots` (on the device), `host_tier` and `eviction`, `ledger` and `boundary` (who may fill
  how much), `kv_travel` (blocks that go from one worker to another)
- `plan`: `demand` (adapters and their load), `capacity` (the law of a worker) and `native_steps` (its step times)
- `step`: `batch_state` (sequences and plans), `batch_admission` (what the next step computes), `request_queues` and
  `overtaking`, `cold_start`, `merge_decision` and `mode_demand` (when an adapter is merged into the weights), `batch_core` (all
  of it)
- `cluster`: `worker_load`, `worker_table`, `holders` and `cluster_state` (the workers' state), `flights` (assignments that no
  state shows yet), `candidates` (workers that can take a request), `cached_prompt` (what a prompt finds on each), `choice` (a
  policy's answer), `waits` (for room), `shared_cost` (the policy), `dispatch` (the decision); `placement` (the adapters each
  worker keeps loaded), `migration_plan` and `rebalance` (requests that move to another worker)
- `worker`: `request_life`, `worker_events`, `worker_core` (a worker's decisions outside its engine), `worker_view` (what
  schedulers see of it), `foresight` (adapters before they are asked for), `pins`
- `lengths`: `features` (of a request), `model` and `calibration`, `quantiles` (of what was seen), `predictor` (all of it)

Beside them: `tenant_shares` (a resource among tenants).
"""
