"""The interface of a protocol, and its two implementations: episodes, and sequences of sessions."""
