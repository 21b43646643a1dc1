"""Jobs, from what is asked for to the stages that make a result."""
