"""What happens with episodes: loading, meta-training, evaluation."""
