"""OpenAI's dialect: what a request says, made ready to run, and what its answer looks like."""
