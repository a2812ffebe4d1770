"""A digital twin: the very policies that the live services run, under a virtual clock.

    workload  who asks when, for what          traces    the same, from recorded files
    events    (time, priority, sequence)       steps     how long a step, a load, a message takes: the only models
    memory    what fits on a device            profile   a worker as a file
    worker    one engine: BatchAdmission, KvBlocks, AdapterSlots, stepped like services/worker steps them
    scheduler one scheduler's view: ClusterState and Flights, fed by the workers' reports, late like the live ones
    cluster   N workers and M schedulers, one run from the first arrival to the last token
    metrics   what came out                    report    the same as a page with plots

Read `cluster` first. Nothing here imports a service: what decides is in `policies`, what drives it is here.
"""
