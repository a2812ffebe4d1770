"""A digital twin: the policies of the live services under a virtual clock.

    workload  requests: times, adapters, lengths   traces   the same, from recorded files
    events    (time, priority, sequence)           steps    durations of steps, loads and messages: the only models
    memory    what fits on a device                profile  a worker as a file
    worker    one engine: BatchAdmission, KvBlocks, AdapterSlots, stepped as in services/worker
    scheduler one scheduler's view: ClusterState and Flights, updated by the workers' reports with the live delays
    cluster   N workers and M schedulers, one run from the first arrival to the last token
    metrics   results of a run                     report   the same as a page with plots
    vllm      another engine: vLLM's behaviour, compared with published runs

Read `cluster` first. Nothing here imports a service: decisions are in `policies`, and this package drives them.
"""
