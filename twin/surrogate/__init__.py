"""Models that learn from the twin: what a worker serves, without simulating it.

Read `samples` (which runs, and what is kept of each), then `train` (the paper's models and ours; the only user of scikit-learn
in the twin). Trained models are evaluated by `policies.plan.surrogate`.
"""
