"""What several benches need: processes, a mesh, load, and what clients see of it. Everything started here ends with the bench.

| module | contents |
| --- | --- |
| `processes` | child processes with logs and pipes; their CPU time and memory |
| `nats` | a nats-server of the bench's own, and a connection to it |
| `mesh` | a whole stack on free ports, as `motet up` starts it |
| `server` | an OpenAI server of any make: time to its first tokens, memory |
| `workers` | worker processes without the other services: the bench is their scheduler and gateway |
| `worker_process` | such a worker with an emulated link or a record of its steps |
| `engine` | a worker's engine without the worker |
| `arrivals` | arrival times of an open loop |
| `requests` | open loop over HTTP: each request is sent at its time and its tokens are timed |
| `laps` | rounds of streams that begin at once: TTFT, TPOT and ITL |
| `closed_loop` | closed loop over HTTP: a stream that ends is asked for again |
| `http` | bodies and sockets, for all of these |
| `answers` | what gateway and services say of themselves: models, metrics |
| `percentiles`, `waiting` | quantiles of samples; waiting for a condition |

Processes of rivals have packages of their own, so this file imports nothing.
"""
