"""The native engine: model, memory and the step loop of one worker."""
