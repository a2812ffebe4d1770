"""vLLM 0.8.5 with LoRA as a flavour of the twin: its scheduler, adapter slots, kernel costs and front end.

It shares no policy with Motet, because vLLM decides differently. It tests the twin's method against published runs, and it
serves plans for vLLM workers. Read `steps` (step times), `engine` (what a step does), `client` (what is measured), `calibrate`
and `runs`; then `serving` (what a server delivers) and `published` (calibrations in the package).
"""
