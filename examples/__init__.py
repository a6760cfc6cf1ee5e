"""Things made with hex-llm that a reader may run, change and take away."""
