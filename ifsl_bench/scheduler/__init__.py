"""The stages of many jobs, each once, by as many workers as there are."""
