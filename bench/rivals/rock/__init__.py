"""ROCK's decisions (Wu et al.: serving multimodal models with heterogeneous-aware orchestration), as a rival.

    mixture    Gaussian mixtures by EM, their number of components by BIC                          section 4.1
    patterns   a task's feature vector, the patterns of a workload, and when they have shifted     section 4.1
    matching   queues of tasks on nodes: weights, the best three, least deviation                  section 4.1, algorithm 1
    layers     groups of nodes, partitions by heat, replicas, and where a replica goes             section 4.2, formulas 3 to 6

All of it is pure: numpy arrays in, decisions out; random numbers come from the caller's generator. Each module says how it
resolves what the paper leaves open. The Markov chain of formula 7 decides nothing there, so it is not here.
"""
