"""The stages of `python -m bench gpu`.

supervisor.py    runs a stage's points in a process that may fail or hang        results.py   one line per point
bed.py           the device of a stage, or the CPU instead                         figures.py   summary of a stage's lines
stages.py        the points of each stage, which these files make:

1 limits.py    2 plans.py, attention.py, tokens.py    3 decode.py    4 serving.py    5 cold.py    6 fits.py    7 kernels.py
8 peers.py

shapes.py        models and adapters of real shapes with random weights
layers.py        a decode step's products and every way of adding LoRA to them
peer_files.py    loads the kernels of vLLM and SGLang, which peer_vllm.py and peer_sglang.py call
"""
