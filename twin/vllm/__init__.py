"""vLLM 0.8.5 with LoRA as a flavour of the twin: its scheduler, adapter slots, kernel costs and front end.

It shares no policy with Motet, because vLLM decides differently. Its purpose is to test the method against published runs. Read
`steps` (step times), `engine` (what a step does), `client` (what is measured), `calibrate` and `runs`.
"""
