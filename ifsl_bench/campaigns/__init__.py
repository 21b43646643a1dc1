"""Many jobs at once: what they share is made once, by as many workers as there are."""
