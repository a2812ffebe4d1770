"""How long things take: the model of step times, a step in numbers, and the estimators that fit them."""
