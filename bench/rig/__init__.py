"""What benches share: processes, a mesh, load, and what clients see of it. Everything started here ends with the bench.

    processes        child processes with logs or pipes; their CPU time and memory
    nats             a nats-server of the bench's own, and a connection to it
    mesh             a whole stack on free ports, as `motet up` starts it
    server           an OpenAI server of any make: seconds to its first tokens, memory
    workers          worker processes without the other services: the bench is their scheduler and gateway
    worker_process   such a worker with an emulated link or a record of its steps
    engine           a worker's engine without the worker

    arrivals         Poisson arrivals
    requests         open loop over HTTP: each request is sent at its time, and its tokens are timed
    laps             streams that all begin at once: TTFT, TPOT and ITL
    closed_loop      closed loop over HTTP: a stream that ends is asked for again
    http             bodies and sockets of these clients
    answers          models and metrics of a running mesh

    percentiles      quantiles of samples
    waiting          waiting for a condition

A bench takes from here what it needs and adds what only it measures. Loads are seeded, so two runs ask for the same.
"""
