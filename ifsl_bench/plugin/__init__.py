"""The contract of a method, its options, and how plugins are found."""
