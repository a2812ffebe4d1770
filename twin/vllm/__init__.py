"""vLLM 0.8.5 with LoRA as a flavour of the twin: its scheduler, its adapter slots, its kernels' costs, its front end.

It shares no policy with Motet, because vLLM decides differently; it is here to prove the method against published runs.
Read `steps` (what a step costs), `engine` (what a step does), `client` (what is measured), `calibrate` and `runs`.
"""
