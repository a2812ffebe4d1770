"""What both engines share: their protocol, requests and reports, and the formats of models and adapters."""
