"""Who may ask, and how much: API keys and limits."""
