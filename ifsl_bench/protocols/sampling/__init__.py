"""Random draws, and the samplers of episodes and of sequences of sessions."""
