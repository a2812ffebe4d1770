"""How long an answer will be: features of a prompt, the predictor, and quantiles of what was seen."""
