"""The episodes' own problems: softmax regression, the tanh network, and the attractors' centres."""
